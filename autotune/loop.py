"""The search: ask for a candidate, run it, take down what came of it, until enough is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from autotune.effort import effort_of
from autotune.errors import AutotuneError
from autotune.finals import finals, needs_another
from autotune.forecast import Forecast
from autotune.history import History, Tried, cap_of, ran_in_full
from autotune.levers import compiles
from autotune.loader import next_loader, usable_cores
from autotune.optuna_study import Asked, OptunaStudy
from autotune.policy import is_premature
from autotune.preparation import Prepared
from autotune.repeats import Repeats
from autotune.reuse import Library
from autotune.runner.local import TrialJob
from autotune.sampler import PolicySampler, candidate_of, distributions, make_sampler
from autotune.speed import Speeds
from autotune.store import NOTHING_LEFT, Stage, Store, StudyRecord, TrialRecord, now
from autotune.study import no_result, open_study
from autotune.trial import Arm, Candidate, Document, Effort, Failed, Outcome
from autotune.units import format_seconds, plural

# Optuna's samplers propose what is known again and again; after so many in a row there is nothing new in them.
_MOST_REPEATS = 64
# Compiling took 32 to 63 s a trial on an H200, and several times as long on a busy machine.
_COMPILE_SECONDS = 300.0
_INTERRUPTED = "interrupted"


class Runner(Protocol):
    """Where trials run."""

    def run(self, job: TrialJob, progress: Callable[[Document], None]) -> Outcome:
        """Run one trial to its end; whatever happens to it is an outcome."""


@runtime_checkable
class Observer(Protocol):
    """Who is told what happens, as it happens; nothing it does changes the search."""

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        """The first trial is about to start."""

    def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
        """A trial was handed to the runner."""

    def progress(self, record: Document) -> None:
        """The running trial entered a ``phase`` or ended a ``step``."""

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        """The trial ended and is recorded."""

    def note(self, text: str) -> None:
        """Something a person should know."""


@dataclass
class Interruption:
    """Set from outside (a signal handler, say) to end the search after the running trial."""

    asked: bool = False


class Search:
    """One run of a search, new or continued. Made for a single call of ``run``."""

    def __init__(
        self,
        prepared: Prepared,
        runner: Runner,
        store: Store,
        observer: Observer,
        log_folder: Path,
        interruption: Interruption | None = None,
        clock: Callable[[], float] = time.monotonic,
        forecast: Forecast | None = None,
    ) -> None:
        self._prepared = prepared
        self._request = prepared.request
        self._runner = runner
        self._store = store
        self._observer = observer
        self._log_folder = log_folder
        self._interruption = interruption or Interruption()
        self._forecast = forecast
        memory = forecast.model if forecast else None
        self._history = History(prepared.ceiling, memory=memory, tolerance=prepared.request.tolerance)
        self._records: dict[str, TrialRecord] = {}
        self._library: Library | None = None
        self._in_space: set[Candidate] = set()
        self._again = Repeats()
        self._repeats = 0
        self._level = prepared.space.batches.levels()[0]
        self._clock = clock
        self._spent_seconds = 0.0
        self._started = clock()

    def run(self) -> StudyRecord:
        """Search to the end; the study as it stands then.

        Raises ``NothingFitsError`` when no candidate stays under the ceiling and ``NoResultError``
        when none completed for other reasons; what was tried is recorded all the same.
        """
        self._open()
        space = distributions(self._prepared.space, self._prepared.baseline, self._request.sampler)
        request = self._request
        sampler = make_sampler(
            request.sampler, request.objective, self._prepared.space, self._history, space, request.seed
        )
        self._optuna = OptunaStudy(
            self._study.name, self._store, sampler, space, request.objective, self._prepared.ceiling
        )
        self._optuna.settle(self._records)
        self._observer.begins(self._prepared, self._study)
        reason = _INTERRUPTED
        finished = False
        try:
            reason = self._loop()
            finished = reason != _INTERRUPTED
        except AutotuneError as error:
            reason = error.message
            raise
        finally:
            self._close_study(reason, finished=finished)
        if finished:
            self._check_result(reason)
        return self._study

    # The study

    def _open(self) -> None:
        opened = open_study(self._prepared, self._store)
        self._study, self._prepared = opened.study, opened.prepared
        self._history.ceiling = self._prepared.ceiling
        self._spent_seconds = opened.study.seconds
        for trial in opened.trials:
            self._remember(trial)
        for note in opened.notes:
            self._observer.note(note)
        # Code of the user's may import and read what has changed since.
        if not self._request.fresh and self._request.workload.source is None:
            past, memory = self._store.past_trials(self._study), self._history.memory
            self._library = Library(past, self._prepared.ceiling, memory)

    def _close_study(self, reason: str, *, finished: bool) -> None:
        # A signal may come between a trial's record and its run, or while its end is written.
        self._store.lose_running_trials(self._study.id, "the search was stopped during this trial")
        best, baseline = self.best(), self.baseline()
        self._study = replace(
            self._study,
            state="finished" if finished else "interrupted",
            stopped_because="\n".join([reason, *self._left_out(reason)]),
            best_trial_id=best.trial_id if best else None,
            baseline_trial_id=baseline.trial_id if baseline else None,
            ended_at=now(),
            seconds=self._elapsed_seconds(),
        )
        self._store.update_study(self._study)

    def _left_out(self, reason: str) -> list[str]:
        """Which arms had no trial, and why, where the search ended because nothing was worth one."""
        if reason != NOTHING_LEFT or self._request.objective != "throughput":
            return []
        return Speeds(self._prepared.space, self._history).left_out_lines()

    def _check_result(self, reason: str) -> None:
        """Raise where there is nothing to recommend, and say why."""
        if self.best() is None:
            is_certain = reason == NOTHING_LEFT
            raise no_result(self._history, self._request, reason, is_certain=is_certain, log_folder=self._log_folder)

    # What is known

    def best(self) -> Tried | None:
        """The trial to recommend so far; only candidates of the space count."""
        among = self._in_space
        if self._request.objective == "max-batch":
            return self._history.largest(among)
        return self._history.winner(among)

    def baseline(self) -> Tried | None:
        """The trial of the ``TrainingArguments`` defaults, where it completed; the latest of several."""
        tried = self._history.outcomes_of(self._prepared.baseline)
        return next((t for t in reversed(tried) if t.measurement), None)

    def _remember(self, trial: TrialRecord) -> None:
        """Take a trial into account, unless it says nothing of its candidate and will be run again."""
        self._records[trial.id] = trial
        counts = self._again.take(trial) if trial.outcome is not None else None
        if counts is not None and counts.outcome is not None:
            in_full = ran_in_full(counts.candidate, counts.outcome)
            if self._prepared.space.contains(counts.candidate):
                self._in_space.add(counts.candidate)
            self._history.add(Tried(counts.id, counts.candidate, counts.outcome, in_full))

    def _elapsed_seconds(self) -> float:
        return self._spent_seconds + self._clock() - self._started

    # The loop

    def _loop(self) -> str:
        """Run trials until there is a reason to stop; the reason."""
        while True:
            reason = self._exhausted()
            if reason:
                return reason
            self._look_ahead()
            stage, forced = self._next_forced()
            if forced is None and (reason := self._done()):
                return reason
            asked = self._optuna.ask(forced, stage)
            if forced is not None:
                self._run_trial(asked, forced, stage)
                continue
            candidate = candidate_of(asked.params, self._prepared.space)
            why, known = self._why_not(candidate)
            if candidate is None or why is not None:
                self._optuna.skip(asked, why or "", known)
                self._repeats += 1
                continue
            self._repeats = 0
            self._say_level(candidate)
            self._run_trial(asked, candidate, stage)

    def _look_ahead(self) -> None:
        """Predict memory beside the baseline, which needs none, unless images are fed; then what the next arm needs.

        Nothing else is timed beside predictions.
        """
        forecast = self._forecast
        if forecast is None or forecast.is_complete:
            return
        stage, forced = self._next_forced()
        if forced is not None:
            if stage == "baseline" and self._request.workload.is_text:
                forecast.begin(self._upcoming_arm())
            return
        if isinstance(self._optuna.sampler, PolicySampler):
            forecast.settle(self._upcoming_arm)
        else:
            forecast.complete()

    def _upcoming_arm(self) -> Arm | None:
        upcoming = self._optuna.upcoming()
        return upcoming.arm if upcoming is not None else None

    def _exhausted(self) -> str | None:
        """Why no further trial may be run, whatever there is to try."""
        request = self._request
        if self._interruption.asked:
            return _INTERRUPTED
        most = request.most_trials
        if most is not None and self._trials_spent >= most:
            return f"the budget of {plural(most, 'trial')} is spent"
        if request.time_budget_seconds is not None and self._elapsed_seconds() >= request.time_budget_seconds:
            return f"the time budget of {format_seconds(request.time_budget_seconds)} is spent"
        return None

    @property
    def _trials_spent(self) -> int:
        """Trials that count against the budget: not those that are run again, nor against a budget that was given
        what is reused; a budget of our own is an end."""
        reused = sum(trial.stage == "reused" for trial in self._records.values()) if self._request.trials else 0
        return len(self._records) - self._again.excused - reused

    def _done(self) -> str | None:
        """Why the sampler has nothing more to propose."""
        if self._repeats >= _MOST_REPEATS:
            return f"the sampler proposed nothing new {_MOST_REPEATS} times in a row"
        is_policy = isinstance(self._optuna.sampler, PolicySampler)
        return NOTHING_LEFT if is_policy and self._optuna.upcoming() is None else None

    def _next_forced(self) -> tuple[Stage, Candidate | None]:
        """What is owed another trial; the baseline; at the end what must be measured once more."""
        if self._again.next is not None:
            return self._again.next
        baseline = self._prepared.baseline
        wants_baseline = self._request.measure_baseline and self._request.objective == "throughput"
        if wants_baseline and not self._history.outcomes_of(baseline):
            return "baseline", baseline
        best = self.best()
        loading = self._next_loader(best) if best else None
        if loading is not None:
            return "search", loading
        if best is None or self._request.objective != "throughput":
            return "search", None
        owed = finals(self._history, self._in_space)
        most = self._request.most_trials
        if most is not None and self._trials_spent == most - 1:
            # The last trial is the winner's, where it is owed one on its own account.
            owed = [best.candidate] if best.candidate in owed and needs_another(best) else []
            return ("final", owed[0]) if owed else ("search", None)
        return ("final", owed[0]) if owed and self._done() else ("search", None)

    def _next_loader(self, best: Tried) -> Candidate | None:
        """The winner with more loading processes, once all else is done, where it waits for data.

        Not where the user's own code streams its data: each process might then bring all of it.
        """
        workload, model = self._request.workload, self._prepared.model
        if workload.data is None and (workload.source is None or model.get("samples") is None):
            return None
        tried = {t.candidate for t in self._history.tried}
        own_workers = model.get("dataloader_num_workers", 0)
        more = next_loader(best.candidate, best.measurement, tried, usable_cores(), own_workers)
        return more if more is not None and self._done() else None

    def _why_not(self, candidate: Candidate | None) -> tuple[str | None, Outcome | None]:
        """Why a proposal need not be run, and what is known of it instead.

        Optuna's samplers repeat themselves and do not know our rules.
        """
        if candidate is None:
            return "not in the space", None
        if self._history.outcomes_of(candidate):
            return "tried before", None
        over = self._history.ruled_out_by(candidate)
        if over is not None:
            return "known not to fit", over.outcome
        if self._history.is_ruled_out(candidate):
            return "predicted not to fit", None
        if is_premature(self._prepared.space, self._history, candidate):
            return "a batch of a larger multiple may fit", None
        return None, None

    def _say_level(self, candidate: Candidate) -> None:
        """Tell the observer that the search goes down to a smaller multiple, and why."""
        batches = self._prepared.space.batches
        level = batches.level(candidate.per_device_train_batch_size)
        if level >= self._level:
            return
        is_possible = any(batches.at_level(multiple) for multiple in batches.levels() if multiple > level)
        why = "fits" if is_possible else f"divides what a device gets of effective batch {batches.effective_batch}"
        self._observer.note(f"no multiple of {self._level} {why}; going down to multiples of {level}")
        self._level = level

    def _run_trial(self, asked: Asked, candidate: Candidate, stage: Stage) -> None:
        study, request = self._study, self._request
        effort = effort_of(request, candidate, stage, self.best())
        record = TrialRecord(
            study_id=study.id,
            number=asked.number,
            candidate=candidate,
            workload_id=study.workload_id,
            environment_id=study.environment_id,
            stage=stage,
            id=asked.trial_id,
            log_path=str(self._log_folder / f"trial-{asked.number:04d}.log"),
        )
        known = self._known(candidate, stage, effort)
        if known is not None:
            self._reuse(asked, record, known)
            return
        self._store.start_trial(record)
        self._observer.trial_begins(asked.number, candidate, stage)
        started = self._clock()
        job = TrialJob(
            trial_id=record.id,
            candidate=candidate,
            cap_bytes=cap_of(candidate.arm, self._prepared.ceiling),
            effort=effort,
            seed=request.seed,
            timeout_seconds=request.trial_timeout_seconds + (_COMPILE_SECONDS if compiles(candidate.arm) else 0.0),
            log_path=record.log_path or "",
            unmodified=stage == "baseline" and request.workload.source is not None,
        )
        outcome: Outcome = Failed("interrupted", "the search was stopped during this trial")
        try:
            outcome = self._runner.run(job, self._observer.progress)
        finally:
            seconds = self._clock() - started
            # Killed between any two of these, the next run of the study can still set right what is missing.
            self._optuna.describe(asked, candidate, outcome)
            self._store.finish_trial(record.id, outcome, seconds)
            self._optuna.tell(asked, candidate, outcome)
        ended = replace(record, outcome=outcome, seconds=seconds)
        self._remember(ended)
        self._observer.trial_ends(ended, self._history)

    def _known(self, candidate: Candidate, stage: Stage, effort: Effort) -> Outcome | None:
        """What a trial would show, where earlier studies tell."""
        return self._library.answer(candidate, effort, in_full=stage == "final") if self._library else None

    def _reuse(self, asked: Asked, record: TrialRecord, outcome: Outcome) -> None:
        """Take an earlier trial's outcome for that of this one."""
        ended = replace(record, stage="reused", outcome=outcome, seconds=0.0, log_path=None)
        self._optuna.describe(asked, ended.candidate, outcome)
        self._store.start_trial(ended)
        self._optuna.tell(asked, ended.candidate, outcome)
        self._remember(ended)
        self._observer.trial_ends(ended, self._history)
