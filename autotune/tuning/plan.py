"""Plan what a search runs next: the baseline, the policy's proposals, repeated measurements.

Uses no processes, no database and no Optuna: ``autotune.tuning.optuna_study`` asks it, and ``loop`` runs what it says.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Failed, Outcome, OutOfMemory
from autotune.core.units import format_seconds, plural
from autotune.estimate.chance import Chances
from autotune.estimate.history import History, Tried, ran_in_full, speed_of
from autotune.space.space import next_loader
from autotune.store.records import NOTHING_LEFT, Repeats, Stage, Stop, StopReason, TrialRecord
from autotune.tuning.anytime import Anytime, Idea
from autotune.tuning.policy import Policy, pinned, to_measure_again
from autotune.tuning.prepare import Prepared

_LEAST_TRAINED = 0.5
"""A trial that trains no more than this share of the baseline's tensors is another training. A choice."""
# Once measuring again has taken a minute and this share of a search, rivals are not told apart any further. A choice:
# on a host whose processes differed by 20 %, six such trials of four candidates took 95 of a search's 219 s (LoRA of
# Llama-3.1-8B, H200, 23 November 2026).
_FINAL_SECONDS, _FINAL_SHARE = 60.0, 0.4
# After a single trial, the next one is expected to take at least the same seconds divided by this. A choice.
_BASELINE_TIMES = 2.0

DRAW: Final = "draw"
"""The result of ``Plan.next`` where nothing is due, and one of Optuna's samplers is to draw a candidate."""
# After this many refused draws in a row, a sampler is taken to have nothing new. A choice.
_MOST_REFUSALS = 64
_NOTHING_NEW = Stop(StopReason.NOTHING_NEW, f"the sampler proposed nothing new {_MOST_REFUSALS} times in a row")

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """The candidate to run next, and its stage: ``baseline``, ``search`` or ``final`` (to measure it again)."""

    stage: Stage
    candidate: Candidate
    why: str = ""
    """For a trial of a lever, what is expected of it, in words; else empty."""
    limit_seconds: float = math.inf
    """Time limit of the trial, where it is shorter than that of all trials."""


class Plan:
    """Knows the trials of one search, and says what to run next, which trial is the best, and when the search ends."""

    def __init__(
        self,
        prepared: Prepared,
        history: History,
        policy: Policy | None,
        clock: Callable[[], float] = time.monotonic,
        spent_seconds: float = 0.0,
    ) -> None:
        """Take the ``policy`` (``None``: Optuna's sampler draws candidates) and the seconds that earlier runs took."""
        self._prepared, self._request, self._space = prepared, prepared.request, prepared.space
        self.history = history
        self._policy = policy
        self._refused = 0
        """How many draws in a row were refused since the last trial ended."""
        self._is_drawn_out = False
        """Whether Optuna's sampler is taken to have no new candidate."""
        self.records: dict[str, TrialRecord] = {}
        """Trials that ended, by id."""
        self.in_space: set[Candidate] = set()
        """The candidates that were tried and may be recommended."""
        self.pending: dict[str, TrialRecord] = {}
        """Trials under way, by id."""
        self.again = Repeats()
        """Which trials count, and which candidates are run again."""
        self._clock, self._spent_seconds, self._started_at = clock, spent_seconds, clock()
        self._proposed: dict[object, Any] = {}
        """Results of ``_once_known``, by what was proposed and what was known."""
        self._has_begun = False
        self.anytime = Anytime(prepared.space)
        self._idea: Idea | None = None
        """The lever whose trial is under way or next."""

    # What is known

    def begin(self, trial: TrialRecord) -> None:
        """Record that a trial was started."""
        self._has_begun = True
        self.pending[trial.id] = trial
        self.history.pending.append(trial.candidate)

    def take(self, trial: TrialRecord) -> None:
        """Record a trial that ended. Where it says nothing about its candidate, it does not count and is due again."""
        if self.pending.pop(trial.id, None) is not None:
            self.history.pending.remove(trial.candidate)
        self.records[trial.id] = trial
        self._refused = 0
        counts = self.again.take(trial) if trial.outcome is not None else None
        if counts is not None and counts.outcome is not None:
            in_full = ran_in_full(counts.candidate, counts.outcome)
            if self._space.contains(counts.candidate):
                self.in_space.add(counts.candidate)
            self.history.add(Tried(counts.id, counts.candidate, counts.outcome, in_full))

    def judged(self, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure in its place where the trial gave gradients to too few parameter tensors.

        More than half as many as in the baseline are enough: an expert (of a mixture) that no token of a few small
        batches reaches has no gradient, either.
        """
        baseline = self.baseline()
        if not isinstance(outcome, Completed) or baseline is None or baseline.measurement is None:
            return outcome
        trained, expected = outcome.measurement.trained_tensors, baseline.measurement.trained_tensors
        if trained is None or expected is None or trained > _LEAST_TRAINED * expected:
            return outcome
        every = trained + outcome.measurement.untrained_tensors
        return Failed("other_training", f"trains {trained} of {every} tensors, the baseline {expected}", during="train")

    def rule_out(self, levers: Collection[str], of: Candidate, outcome: Failed) -> list[str]:
        """Rule out levers that make the candidate ``of`` another training than the requested one.

        They are proposed no more. Trials that share the value of such a lever with ``of`` get this ``outcome``; return
        their ids.
        """
        self.anytime.leave_out(levers)
        changed_ids = []
        for tried in list(self.history.tried):
            arm = tried.candidate.arm
            if any(getattr(arm, name) == getattr(of.arm, name) for name in levers) and tried.trial_id in self.records:
                self.change_outcome(tried.trial_id, outcome)
                changed_ids.append(tried.trial_id)
        return changed_ids

    def change_outcome(self, trial_id: str, outcome: Outcome) -> None:
        """Replace the outcome of a trial of this search."""
        self.history.replace(next(tried for tried in self.history.tried if tried.trial_id == trial_id), outcome)
        self.records[trial_id] = replace(self.records[trial_id], outcome=outcome)
        self._proposed = {}

    def drop_reused(self) -> None:
        """Forget the speeds that were taken from earlier searches; reused trials out of memory stay."""
        kept = [t for t in self.records.values() if t.stage != "reused" or not isinstance(t.outcome, Completed)]
        # All that follows from trials is rebuilt from the kept ones.
        self.records, self.in_space, self.again = {}, set(), Repeats()
        self._proposed = {}
        self.history.clear()
        for trial in kept:
            self.take(trial)

    def told_of_lever(self, trial: TrialRecord) -> str | None:
        """Return in words what a lever gained in an ended trial; ``None`` without a lever, or before a repetition."""
        idea = self._idea
        if idea is None or idea.candidate != trial.candidate or self.again.owed:
            return None
        self._idea = None
        if isinstance(trial.outcome, Failed | OutOfMemory):
            return f"{idea.name} is left out: {' '.join(trial.outcome.message.split())[:160]}"
        # The trial that counts, where a disturbed one was repeated.
        tried = self.history.outcomes_of(idea.candidate)[-1]
        leaves_too_little = ", and leaves too little memory" if self.history.is_over(tried) else ""
        return f"{idea.name} gave {speed_of(tried) / idea.best:.2f} ×{leaves_too_little}"

    def best(self) -> Tried | None:
        """Return the trial to recommend so far; ``None`` without one. Only candidates of the space count."""
        return self.history.answer(self._request.objective, self.in_space)

    def baseline(self) -> Tried | None:
        """Return the latest completed trial of the baseline: the defaults or own settings; ``None`` without one.

        Final trials, which measure the baseline again where it may be the answer, count only where there is no other.
        """
        tried = [t for t in reversed(self.history.outcomes_of(self._prepared.baseline)) if t.measurement]
        first = (t for t in tried if self.records[t.trial_id].stage != "final")
        return next(first, tried[0] if tried else None)

    def elapsed_seconds(self) -> float:
        """Return the seconds that this search has taken, with earlier runs of it."""
        return self._spent_seconds + self._clock() - self._started_at

    # What is next

    def exhausted(self) -> Stop | None:
        """Return why the budget of trials or time allows no further trial; ``None`` where it does."""
        # Whether this run of the search continues earlier trials, and has not started one.
        has_run_nothing = bool(self.records) and not self._has_begun
        most = self._request.most_trials
        if most is not None and self.trials_spent >= most:
            spent = "was spent before: nothing was run" if has_run_nothing else "is spent"
            return Stop(StopReason.TRIALS, f"the budget of {plural(most, 'trial')} {spent}")
        budget = self._request.time_budget_seconds
        took = [t.seconds for t in self.records.values() if t.seconds and isinstance(t.outcome, Completed)]
        # The shortest trial so far. The baseline, which is the first, is often the slowest.
        least_seconds = min(took) / (1 if len(took) > 1 else _BASELINE_TIMES) if took else 0.0
        elapsed_seconds = self.elapsed_seconds()
        if budget is None or elapsed_seconds + least_seconds < budget:
            return None
        if elapsed_seconds < budget:
            spent = "leaves no time for a trial"
        elif has_run_nothing and self._spent_seconds >= budget:
            spent = f"was spent before, in {format_seconds(self._spent_seconds)}: nothing was run"
        else:
            spent = "is spent"
        return Stop(StopReason.TIME, f"the time budget of {format_seconds(budget)} {spent}")

    @property
    def trials_spent(self) -> int:
        """Trials charged to the budget, those under way included.

        Repeats are free. Reused trials are free where a budget was given; they count where the budget is the default
        one of Optuna's samplers, which only ends the search.
        """
        reused = sum(trial.stage == "reused" for trial in self.records.values()) if self._request.trials else 0
        return len(self.records) + len(self.pending) - self.again.excused - reused

    def next(self) -> Step | Literal["draw"] | None:
        """Return the next step, or ``DRAW`` where Optuna's sampler draws the next candidate; ``None`` without a step.

        ``done`` then says why, unless the results of running trials are needed first.
        """
        if any(trial.stage == "final" for trial in self.pending.values()):
            # A final trial runs alone: others use the same cores and power.
            return None
        forced = self._next_due()
        if forced is not None:
            return None if forced.stage == "final" and self.pending else forced
        if self._is_last and self.pending:
            return None
        candidate = self.upcoming()
        if candidate is not None:
            return Step("search", candidate)
        if self._may_draw:
            return DRAW
        idea = self._next_idea()
        if idea is None:
            return None
        self._idea = idea
        return Step("search", idea.candidate, idea.describe(), idea.limit_seconds)

    def drawn(self, *, is_refused: bool) -> None:
        """Count a draw of Optuna's sampler that was accepted or refused.

        After too many refused in a row, drawing ends or, with trials running, waits for the end of one.
        """
        self._refused = self._refused + 1 if is_refused else 0
        if self._refused >= _MOST_REFUSALS:
            self._is_drawn_out = not self.history.pending

    @property
    def _may_draw(self) -> bool:
        """Whether Optuna's sampler is to draw the next candidate, and may have a new one."""
        return self._policy is None and not self._is_drawn_out and self._refused < _MOST_REFUSALS

    def arms_that_save(self) -> list[Arm]:
        """Return the best candidate's arm with each lever that saves memory, to be predicted before one is chosen."""
        return self.anytime.arms_that_save(self.history, self.in_space)

    def _next_idea(self) -> Idea | None:
        """Return the next lever worth a trial, once nothing else is; ``None`` if none is, or trials run."""
        seconds = [trial.seconds for trial in self.records.values() if trial.seconds]
        usual, spent = statistics.median(seconds) if seconds else 0.0, self._seconds_with_levers
        return self._once_known(
            "lever", lambda: self.anytime.next(self.history, self.in_space, usual_seconds=usual, spent_seconds=spent)
        )

    @property
    def _seconds_with_levers(self) -> float:
        """The seconds that trials with levers have taken."""
        return sum(t.seconds or 0.0 for t in self.records.values() if self.anytime.is_late(t.candidate))

    @property
    def owes_baseline(self) -> bool:
        """Whether the baseline is wanted, without a trial, and may fit; the last is not asked for own code."""
        request, baseline = self._request, self._prepared.baseline
        if not request.wants_baseline or self.history.attempts(baseline):
            return False
        return request.workload.source is not None or not Chances(self.history).rules_out(baseline)

    def done(self) -> Stop | None:
        """Return why the policy has nothing more to propose; ``None`` if it may have."""
        if not self._is_settled or self._next_idea() is not None:
            return None
        return NOTHING_LEFT if self._policy is not None else _NOTHING_NEW

    @property
    def _is_settled(self) -> bool:
        """Whether there is nothing more to propose, and no trial is running, whose result may change that."""
        return not self.pending and self.upcoming() is None and not self._may_draw

    def upcoming(self) -> Candidate | None:
        """Return the policy's next proposal; ``None`` where it has none, or Optuna's sampler draws."""
        policy = self._policy
        return None if policy is None else self._once_known("candidate", lambda: policy.next(self.history))

    def _once_known(self, what: str, propose: Callable[[], T]) -> T:
        """Return the result of ``propose``, cached under the name ``what`` until there is a new trial or prediction."""
        memory = self.history.memory
        known = what, len(self.history.tried), memory.version if memory is not None else 0, frozenset(self.pending)
        if known not in self._proposed:
            self._proposed[known] = propose()
        found: T = self._proposed[known]
        return found

    @property
    def _is_last(self) -> bool:
        """Whether the budget allows exactly one more trial."""
        most = self._request.most_trials
        return most is not None and self.trials_spent == most - 1

    def _next_due(self) -> Step | None:
        """Return the next trial that is due; ``None`` where none is.

        Due are repeats, then the baseline, and at the end variants of the winner and final trials of it and its rivals.
        """
        for stage, candidate in self.again.owed:
            if candidate not in self.history.pending:
                return Step(stage, candidate)
        if self.owes_baseline:
            return Step("baseline", self._prepared.baseline)
        best = self.best()
        if best is None:
            return None
        # Variants of a winner with levers take the time of levers: they compile again, at best from a cache.
        seconds, spent = self.records[best.trial_id].seconds or 0.0, self._seconds_with_levers
        if not self.anytime.is_late(best.candidate) or self.anytime.has_time(seconds, spent):
            if (variant := self._next_loader(best)) is not None:
                return Step("search", variant)
            # The winner is pinned to one core if host-bound, after all levers: in a CUDA graph it needs no fast host.
            on_one_core = pinned(self._space, self.history, best)
            is_its_turn = self._is_settled and not self._is_last and self._next_idea() is None
            if on_one_core is not None and not self.history.attempts(on_one_core) and is_its_turn:
                return Step("search", on_one_core)
        return self._next_final(best) if self._request.objective == "throughput" else None

    def _next_final(self, best: Tried) -> Step | None:
        """Return the next final trial, which measures the winner or a close rival again; ``None`` where none is due."""
        if self.pending:
            return None
        if self._is_last:
            # The last trial of the budget measures the winner again, if that is due. Where the winner is the baseline,
            # which the user has without a search, the trial is for a candidate that may be better.
            may_go_on = self.upcoming() is not None or self._may_draw
            is_for_another = best.candidate == self._prepared.baseline and may_go_on
            owed = to_measure_again(self.history, {best.candidate}, tells_apart=False)
            return None if is_for_another or not owed else Step("final", best.candidate)
        if not self._is_settled:
            return None
        final_seconds = sum(trial.seconds or 0.0 for trial in self.records.values() if trial.stage == "final")
        limit_seconds = max(_FINAL_SECONDS, _FINAL_SHARE * self.elapsed_seconds())
        # A reused trial took no time.
        took = [trial.seconds for trial in self.records.values() if trial.candidate == best.candidate and trial.seconds]
        share = max(took) / self.elapsed_seconds() if took and self.elapsed_seconds() else math.inf
        tells_apart = final_seconds / len(self._request.slots) <= limit_seconds
        owed = to_measure_again(self.history, self.in_space, tells_apart=tells_apart, share=share)
        if owed and self._next_idea() is not None:
            # Levers come first: on a noisy host six final trials stood before levers that doubled the speed.
            return None
        return Step("final", owed[0]) if owed else None

    def _next_loader(self, best: Tried) -> Candidate | None:
        """Return the winner with more data loader workers, if it waits for data and all else is done; else ``None``.

        Also ``None`` where own code streams its data: each worker might load all of it. With synthetic samples, workers
        are only for speed on a GPU: stacking 64 images of 224 pixels took an H200's host a third of a step.
        """
        workload, model = self._request.workload, self._prepared.model
        if workload.source is not None and (not model.interface.tunes_loader or model.samples is None):
            return None
        is_made_up = workload.data is None and workload.source is None
        if is_made_up and (self._request.device.kind != "cuda" or self._request.objective != "throughput"):
            return None
        tried = {t.candidate for t in self.history.tried}
        cores = self._prepared.usable_cores
        variant = next_loader(best.candidate, best.measurement, tried, cores, model.dataloader_num_workers)
        return variant if variant is not None and self._is_settled else None
