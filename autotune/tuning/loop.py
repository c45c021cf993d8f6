"""Run the search: ask Optuna's study for steps, run their trials in all slots, record and report the outcomes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import optuna

from autotune.core.candidate import Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.errors import AutotuneError, NoResultError, NothingFitsError, StorageError
from autotune.core.look import Look
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, Effort, Failed, Outcome, OutOfMemory, source_of
from autotune.core.placement import Placement
from autotune.core.rehearsal import Rehearsal
from autotune.core.schema import decode
from autotune.core.signals import signals_delayed
from autotune.core.units import format_bytes, format_rate, format_seconds, plural
from autotune.devices.gpus import chip_of_device
from autotune.estimate.gpu_time import calibrated
from autotune.estimate.history import History, batch_of, cap_of, failed_without_verdict
from autotune.estimate.pooling import Speed, Tried
from autotune.estimate.step_time import StepForecast
from autotune.execution import Executor, TrialJob
from autotune.results.report import deviations_before
from autotune.results.wording import rate_unit
from autotune.space.features import compiled_recomputes
from autotune.store.records import (
    INTERRUPTED,
    NOTHING_LEFT,
    LeftOut,
    Stage,
    Stop,
    StopReason,
    StudyRecord,
    TrialRecord,
    new_id,
    now,
)
from autotune.store.repository import Store
from autotune.tuning.effort import effort_of, timeout_seconds
from autotune.tuning.environment import is_of_kind
from autotune.tuning.forecast import Forecast, LookAhead
from autotune.tuning.interruption import Interruption
from autotune.tuning.left_out import left_out_arms
from autotune.tuning.look import Looker, Rehearse
from autotune.tuning.optuna_study import OptunaStudy
from autotune.tuning.plan import Plan, Step
from autotune.tuning.policy import make_policy
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest
from autotune.tuning.reuse import Library
from autotune.tuning.studies import open_study

# A search ends where the user's own settings and this many other candidates fail with the same message. A choice.
_FAIL_ALIKE = 2
# Earlier trials are reused if one of them, measured again, differs by no more than its interval or this. A choice.
_SAME_SPEED = 0.05
# Once this many winners ran out of memory in a rehearsal, the next one is the answer in any case. A choice.
_MOST_DEATHS = 8


def _without_numbers(failed: Failed) -> str:
    """Return a failure's message without numbers, which differ between batches and processes."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", failed.message)


@runtime_checkable
class Observer(Protocol):
    """Receives the events of a search, without an influence on it: to print them, or to send them elsewhere."""

    def begins(self, prepared: Prepared, study: StudyRecord) -> None:
        """Handle the start of a search, before its first trial."""

    def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
        """Handle the start of a trial."""

    def progress(self, number: int, progress: Progress) -> None:
        """Handle a new phase or the end of a step of a running trial."""

    def trial_ends(self, trial: TrialRecord, history: History) -> None:
        """Handle the end of a trial, which is recorded."""

    def note(self, text: str) -> None:
        """Show a note to the user."""


@dataclass(frozen=True)
class _Running:
    """A running trial."""

    record: TrialRecord
    optuna_trial: optuna.Trial
    placement: Placement
    started_at: float
    reported_at: float
    progress: Progress
    """The trial's last report, which came at ``reported_at`` of the clock."""


class Search:
    """A search, new or continued: runs the trials that its plan proposes, and records them. ``run`` is called once."""

    def __init__(
        self,
        prepared: Prepared,
        executor: Executor,
        store: Store,
        observer: Observer,
        log_folder: Path,
        interruption: Interruption | None = None,
        clock: Callable[[], float] = time.monotonic,
        forecast: Forecast | None = None,
        looker: Looker | None = None,
        rehearse: Rehearse | None = None,
    ) -> None:
        """Search in ``prepared`` by trials of ``executor``, recorded in ``store`` and told to ``observer``.

        ``looker`` compares a winner's training with the requested one; ``rehearse`` runs once what a long run with the
        winner does beyond its steps. Without ``forecast`` no memory is predicted.
        """
        self._prepared = prepared
        self._looker, self._rehearse = looker, rehearse
        self._died: list[tuple[list[Tried], Rehearsal]] = []
        """For each winner whose rehearsal ran out of memory: the trials that this ruled out, and the rehearsal."""
        self._request, self._executor, self._store = prepared.request, executor, store
        self._observer, self._log_folder, self._forecast = observer, log_folder, forecast
        self._interruption = interruption or Interruption()
        memory = forecast.model if forecast else None
        chip = chip_of_device(prepared.request.device.name)
        steps = None
        if memory is not None and chip is not None and chip.rates is not None:
            steps = StepForecast(memory, calibrated(chip, prepared.calibration))
        source = prepared.request.workload.source
        has_own = source is not None and source.kind != "loop" and prepared.model.own is not None
        is_quantized, packages = prepared.request.workload.quantize is not None, prepared.environment["packages"]
        self._history = History(
            prepared.ceiling,
            memory=memory,
            steps=steps,
            tolerance=prepared.request.tolerance,
            own=prepared.baseline if has_own else None,
            layers=prepared.model.checkpointing_layers or 1,
            compiled_recomputes=not is_quantized or compiled_recomputes(packages["torch"], packages["transformers"]),
        )
        self._library: Library | None = None
        self._control: Candidate | None = None
        """The candidate that is measured again to see whether the machine is as fast as in earlier searches."""
        self._multiple = prepared.space.batches.levels()[0]
        """The number of which the batches tried now are multiples; smaller ones follow where nothing fits."""
        self._clock, self._started_at = clock, clock()
        self._running: dict[str, _Running] = {}

    def run(self) -> StudyRecord:
        """Search to the end; return the study.

        Raises ``NothingFitsError`` where no candidate fits under the ceiling, and ``NoResultError`` where none
        completed for other reasons. The trials are recorded in either case.
        """
        self._open()
        self._observer.begins(self._prepared, self._study)
        try:
            stop = self._run_trials()
            while self._check_same_training() or self._rehearse_winner():
                stop = self._run_trials()
        except BaseException as error:
            self._stop_after(error)
            raise
        self._record_end(stop)
        if self._study.state == "finished" and self._plan.best() is None:
            raise _no_result(self._history, self._request, stop, log_folder=self._log_folder)
        return self._study

    # The study

    def _open(self) -> None:
        """Open the study, new or recorded; make the plan, Optuna's study and the library of earlier trials from it."""
        opened = open_study(self._prepared, self._store)
        self._prepared, request = opened.prepared, self._request
        self._history.ceiling = self._prepared.ceiling
        repeated = self._store.repeated_trials([opened.study.environment_id])
        self._history.before = deviations_before(repeated, opened.study)
        spent_seconds = opened.study.seconds + self._clock() - self._started_at
        self._study = opened.study
        policy = make_policy(request.sampler, request.objective, self._prepared.space)
        self._plan = Plan(self._prepared, self._history, policy, self._clock, spent_seconds)
        seed, is_parallel = request.seed + len(opened.trials), len(self._executor.slots) > 1
        self._optuna = OptunaStudy(self._prepared, self._plan, seed=seed, is_parallel=is_parallel)
        for trial in opened.trials:
            self._plan.take(trial)
        self._optuna.know((tried.candidate, tried.outcome) for tried in self._history.tried)
        self._next_number = max((trial.number for trial in (*opened.trials, *opened.elsewhere)), default=-1) + 1
        for note in opened.notes:
            self._observer.note(note)
        # Trials of the user's own code are not reused: it may import and read files that have changed since.
        if not request.fresh and request.workload.source is None:
            past = self._store.past_trials(opened.study)
            self._library = Library(past, self._prepared.ceiling, self._history.memory)
            self._learn_from_elsewhere(opened.study)
        self._look_ahead = LookAhead(self._forecast, self._plan, self._prepared)

    def _learn_from_elsewhere(self, study: StudyRecord) -> None:
        """Use trials on other machines of this kind to check predictions and to order the first trials."""
        is_alike: dict[str, bool] = {}
        for past in self._store.past_trials(study, elsewhere=True):
            trial, ceiling = past.trial, decode(past.ceiling, Ceiling)
            environment_id, outcome = trial.environment_id, trial.outcome
            if environment_id not in is_alike:
                environment = self._store.environment(environment_id)
                is_alike[environment_id] = is_of_kind(environment, self._prepared.environment)
            if not is_alike[environment_id] or outcome is None:
                continue
            if self._history.memory is not None:
                self._history.memory.learn(trial.candidate, outcome, cap_of(trial.candidate.arm, ceiling))
            if isinstance(outcome, Completed) and outcome.measurement.fits(trial.candidate.arm, self._history.ceiling):
                self._history.elsewhere[trial.candidate] = outcome.measurement.samples_per_second

    def _record_end(self, stop: Stop) -> None:
        """Record the end of the search with its reason, the best trial, and the arms and levers that were left out."""
        # A signal between a trial's record and its run, or while its end is written, leaves it recorded as running.
        self._store.lose_running_trials(self._study.id, "the search was stopped during this trial")
        self._keep_best(
            state="interrupted" if stop.reason in (StopReason.INTERRUPTED, StopReason.ERROR) else "finished",
            stop_reason=stop.reason,
            stopped_because=stop.sentence,
            left_out=self._left_out(stop),
            ended_at=now(),
        )

    def _left_out(self, stop: Stop) -> tuple[LeftOut, ...]:
        """Return arms without a trial and failing levers, with the reasons; empty unless nothing was left to try."""
        if stop != NOTHING_LEFT or self._request.objective != "throughput":
            return ()
        return (*left_out_arms(self._prepared.space, self._history), *self._plan.anytime.left_out(self._history))

    def _stop_after(self, error: BaseException) -> None:
        """End the running trials after an error or a signal, and record what can be recorded.

        An error of the database must not hide the error or the Ctrl-C that came before it.
        """
        running, self._running = self._running, {}
        try:
            if running:
                self._executor.close()
            for trial in running.values():
                now = self._clock()
                doing, seconds = trial.progress.describe(now - trial.reported_at), now - trial.started_at
                outcome = Failed(
                    "interrupted", f"the search was stopped after {format_seconds(seconds)} of this trial ({doing})"
                )
                if isinstance(error, KeyboardInterrupt):
                    self._observer.note(f"trial {trial.record.number}: {outcome.message}")
                self._store.finish_trial(trial.record.id, outcome, seconds)
            self._record_end(Stop(StopReason.ERROR, error.message) if isinstance(error, AutotuneError) else INTERRUPTED)
        except StorageError as storage_error:
            if not isinstance(error, StorageError):
                self._observer.note(f"the end of the search is not recorded: {storage_error.message}")

    # The loop

    def _run_trials(self) -> Stop:
        """Run trials until there is a reason to stop and none is running, and return the reason."""
        while True:
            stop = self._fill_slots()
            if not self._running:
                return stop or NOTHING_LEFT
            self._handle_next_report()

    def _check_same_training(self) -> bool:
        """Compare the winner's training with the requested one; return whether levers that change it were ruled out."""
        best = self._plan.best()
        if self._looker is None or best is None or self._interruption.asked:
            return False
        verdict = self._looker.differences(best.candidate)
        before = self._study.look
        look = replace(verdict.look, seconds=verdict.look.seconds + (before.seconds if before else 0.0))
        if before is not None:
            look = replace(look, ruled_out=(*before.ruled_out, *look.ruled_out))
        # The look is written to the database with the end of the search, as a rehearsal is.
        self._study = replace(self._study, look=look)
        if not verdict.levers:
            return False
        why = f"another training: {'; '.join(verdict.look.ruled_out)}"
        self._observer.note(f"{why}; going on without")
        outcome = Failed("other_training", why)
        for trial_id in self._plan.rule_out(verdict.levers, best.candidate, outcome):
            self._store.change_outcome(trial_id, outcome)
        return True

    def _rehearse_winner(self) -> bool:
        """Rehearse a long run with the winner; return whether the search goes on with candidates of less memory.

        The search goes on where the rehearsal runs out of memory and a smaller batch may not. Where no candidate
        passes, the first winner is the answer, with a warning.
        """
        if self._rehearse is None or self._interruption.asked:
            return False
        best = self._plan.best()
        if best is None:
            if self._died:
                # The first winner and what its rehearsal ruled out get their own outcomes back.
                trials, first_rehearsal = self._died[0]
                for tried in trials:
                    self._change_outcome(tried, tried.outcome)
                self._keep_rehearsal(first_rehearsal)
            return False
        rehearsal = self._rehearse(best.candidate, self._plan.elapsed_seconds())
        if rehearsal is None:
            return False
        self._keep_rehearsal(rehearsal)
        if rehearsal.needs_less is None or len(self._died) == _MOST_DEATHS:
            return False
        trials = [each for each in self._history.outcomes_of(best.candidate) if each.trial_id in self._plan.records]
        self._died.append((trials, rehearsal))
        self._observer.note(f"{best.candidate.describe()}: {rehearsal.needs_less}; going on with what needs less")
        outcome = OutOfMemory(rehearsal.needs_less, during="the longest batch")
        for tried in trials:
            self._change_outcome(tried, outcome)
        for tried in self._history.feasible():
            over = self._history.ruled_out_by(tried.candidate)
            if over is not None and over.outcome == outcome and tried.trial_id in self._plan.records:
                # This candidate needs at least as much memory as the winner.
                trials.append(tried)
                self._change_outcome(tried, outcome)
        return True

    def _keep_rehearsal(self, rehearsal: Rehearsal) -> None:
        """Keep a rehearsal with the study, which is written to the database at the end of the search."""
        self._study = replace(self._study, look=replace(self._study.look or Look(), rehearsal=rehearsal))

    def _change_outcome(self, tried: Tried, outcome: Outcome) -> None:
        """Replace the outcome of a trial, in the plan and in the database."""
        self._plan.change_outcome(tried.trial_id, outcome)
        self._store.change_outcome(tried.trial_id, outcome)

    def _fill_slots(self) -> Stop | None:
        """Start trials while slots are free.

        Return why the search starts no more; ``None`` where all slots are busy, or running trials decide what is next.
        """
        while len(self._running) < len(self._executor.slots):
            stop = INTERRUPTED if self._interruption.asked else self._plan.exhausted()
            if stop is not None:
                return stop
            if not self._look_ahead.is_ready():
                return None
            asked = self._optuna.ask()
            if asked is None:
                return self._plan.done()
            step, optuna_trial = asked
            if step.why:
                # The step is for a lever, which comes after the first answer.
                self._answer_first()
                self._observer.note(step.why)
            elif step.stage == "search":
                self._report_smaller_multiple(step.candidate)
            self._start_step(step, optuna_trial)
        return None

    def _answer_first(self) -> None:
        """Report and record the first answer, so that it can be exported while levers are tried."""
        best = self._plan.best()
        if self._study.best_trial_id is not None or best is None or best.measurement is None:
            return
        unit = rate_unit(self._request.workload.document())
        seconds, rate = format_seconds(self._plan.elapsed_seconds()), format_rate(best.measurement.samples_per_second)
        self._observer.note(f"answer after {seconds}: {rate} {unit}, {best.candidate.describe()}; going on …")
        self._keep_best()

    def _keep_best(self, **changes: Any) -> None:
        """Record best trial, baseline and seconds so far, with ``changes`` of the study's other fields."""
        best, baseline = self._plan.best(), self._plan.baseline()
        self._study = replace(
            self._study,
            best_trial_id=best.trial_id if best else None,
            baseline_trial_id=baseline.trial_id if baseline else None,
            seconds=self._plan.elapsed_seconds(),
            **changes,
        )
        self._store.update_study(self._study)

    def _report_smaller_multiple(self, candidate: Candidate) -> None:
        """Tell the observer where the next candidate's batch is a multiple of a smaller number than before, and why."""
        batches = self._prepared.space.batches
        multiple = batches.level(candidate.per_device_train_batch_size)
        if multiple >= self._multiple:
            return
        above = [batch for larger in batches.levels() if larger > multiple for batch in batches.at_level(larger)]
        has_failed = any(batch_of(t) in above and failed_without_verdict(t) for t in self._history.tried)
        why = f"divides what a device gets of effective batch {batches.effective_batch}"
        if above:
            why = "completed" if has_failed else "fits"
        self._observer.note(f"no multiple of {self._multiple} {why}; going down to multiples of {multiple}")
        self._multiple = multiple

    def _start_step(self, step: Step, optuna_trial: optuna.Trial) -> None:
        """Start the trial of a step, or record an outcome of an earlier search in place of a trial.

        Before a trial is compared with such outcomes, a control takes its place: the fastest of them is measured again.
        """
        candidate, stage, study = step.candidate, step.stage, self._study
        if (control := self._next_control(step)) is not None:
            candidate, stage = control, "final"
        number, self._next_number = self._next_number, self._next_number + 1
        effort = effort_of(self._request, candidate, stage, self._plan.best(), self._history)
        record = TrialRecord(
            study_id=study.id, number=number, candidate=candidate, stage=stage, workload_id=study.workload_id,
            environment_id=study.environment_id, log_path=str(self._log_folder / f"trial-{number:04d}.log"),
        )  # fmt: skip
        known = self._reusable_outcome(candidate, stage, effort) if control is None else None
        if known is not None:
            self._optuna.tell(optuna_trial, candidate, known)
            self._record_reused(record, known)
            is_exact = isinstance(known, Completed) and known.source is not None and not known.source.derived
            while is_exact and (another := self._reusable_outcome(candidate, "final", effort)) is not None:
                # Every process that measured the candidate counts, not the latest alone.
                number, self._next_number = self._next_number, self._next_number + 1
                self._record_reused(replace(record, number=number, id=new_id()), another)
            return
        free = list(self._executor.slots)
        for running in self._running.values():
            free.remove(running.placement)
        placement = free[0]
        with signals_delayed():
            self._store.start_trial(record)
            now = self._clock()
            self._running[record.id] = _Running(record, optuna_trial, placement, now, now, Progress("start"))
        self._plan.begin(record)
        self._observer.trial_begins(number, candidate, stage)
        job = self._job_of(record, effort, placement)
        limit_seconds = min(job.timeout_seconds, step.limit_seconds)
        self._executor.submit(replace(job, timeout_seconds=limit_seconds))

    def _record_reused(self, record: TrialRecord, outcome: Outcome) -> None:
        """Record the outcome of an earlier trial as the outcome of this trial, without running it."""
        ended = replace(record, stage="reused", outcome=outcome, seconds=0.0, log_path=None)
        self._store.start_trial(ended)
        self._take(ended)

    def _job_of(self, record: TrialRecord, effort: Effort, placement: Placement) -> TrialJob:
        """Return the job that runs a trial."""
        request, candidate, source = self._request, record.candidate, self._request.workload.source
        # Their baseline runs with the settings that the code has. A script that gets all on its command line has none.
        has_own_settings = source is not None and (source.kind == "loop" or self._prepared.model.own is not None)
        return TrialJob(
            trial_id=record.id, candidate=candidate, cap_bytes=cap_of(candidate.arm, self._prepared.ceiling),
            effort=effort, seed=request.seed, log_path=record.log_path or "", placement=placement,
            timeout_seconds=timeout_seconds(request, self._prepared.model.parameters, candidate, effort, self._history),
            unmodified=record.stage == "baseline" and has_own_settings,
        )  # fmt: skip

    def _handle_next_report(self) -> None:
        """Wait for the next report of a running trial: pass its progress to the observer, or record its outcome."""
        trial_id, report = self._executor.wait()
        if isinstance(report, Progress):
            running = self._running[trial_id]
            self._running[trial_id] = replace(running, progress=report, reported_at=self._clock())
            self._observer.progress(running.record.number, report)
            return
        with signals_delayed():
            trial = self._running.pop(trial_id)
            outcome, seconds = self._plan.judged(report), self._clock() - trial.started_at
            self._store.finish_trial(trial_id, outcome, seconds)
        self._optuna.tell(trial.optuna_trial, trial.record.candidate, outcome)
        self._take(replace(trial.record, outcome=outcome, seconds=seconds))

    def _take(self, ended: TrialRecord) -> None:
        """Tell plan and observer of a trial that ended, run here or reused.

        Raises ``NoResultError`` or ``NothingFitsError`` where all later trials would fail alike. Drops reused trials
        where this one shows that their speeds no longer hold.
        """
        expected = self._history.speed(ended.candidate)
        self._plan.take(ended)
        self._observer.trial_ends(ended, self._history)
        if ended.candidate == self._control and ended.stage == "final" and expected is not None:
            self._drop_reused_if_speed_differs(ended, expected)
        if (gain := self._plan.told_of_lever(ended)) is not None:
            self._observer.note(gain)
            self._keep_best()
        self._raise_if_unavailable(ended)
        self._raise_if_others_fail_too(ended)
        self._raise_if_nothing_begins(ended)

    def _raise_if_unavailable(self, ended: TrialRecord) -> None:
        """Raise ``NoResultError`` where every trial failed, since the training cannot have a requested setting.

        A smaller batch does not help. Another attention may: it decides whether a model keeps joined samples apart, so
        each has to have failed. The baseline does not count: it trains without the requested setting.
        """
        searched = [trial for trial in self._plan.records.values() if trial.stage != "baseline"]
        outcomes = {trial.candidate.arm: trial.outcome for trial in searched}
        if not isinstance(ended.outcome, Failed) or any(
            not isinstance(outcome, Failed) or outcome.reason != "unavailable" for outcome in outcomes.values()
        ):
            return
        if {arm.attn_implementation for arm in self._prepared.space.arms} <= {
            arm.attn_implementation for arm in outcomes
        }:
            raise NoResultError(
                ended.outcome.message, f"search again without that setting; the trial's log is {ended.log_path}"
            )

    def _raise_if_others_fail_too(self, ended: TrialRecord) -> None:
        """Raise ``NoResultError`` where the user's own settings and two others failed with the same message.

        Numbers in the messages may differ. Where the own settings alone fail, as with too few steps of a large batch,
        the search only lacks its reference.
        """
        source, outcome = self._request.workload.source, ended.outcome
        if source is None or not isinstance(outcome, Failed) or outcome.reason != "error" or self._plan.best():
            return
        alike = [
            trial
            for trial in self._plan.records.values()
            if isinstance(trial.outcome, Failed) and _without_numbers(trial.outcome) == _without_numbers(outcome)
        ]
        own = next((trial for trial in alike if trial.stage == "baseline"), None)
        if own is not None and len({trial.candidate for trial in alike}) > _FAIL_ALIKE:
            raise NoResultError(
                f"{source.name} failed with the settings of its baseline ({own.candidate.describe()}) and with "
                f"{ended.candidate.describe()}, so nothing else was tried: {outcome.message}",
                f"mend it and search again; its log is {ended.log_path}",
            )

    def _raise_if_nothing_begins(self, ended: TrialRecord) -> None:
        """Raise ``NothingFitsError`` where all trials, at least two, of own code ran out of memory before training.

        The memory that it uses before training, such as for its data, is the same for every batch.
        """
        source, outcomes = self._request.workload.source, [t.outcome for t in self._plan.records.values()]
        begun = [o for o in outcomes if not isinstance(o, OutOfMemory) or o.during == "train"]
        if source is None or not isinstance(ended.outcome, OutOfMemory) or len(outcomes) < 2 or begun:
            return
        cap_bytes = self._history.ceiling.cap_bytes
        raise NothingFitsError(
            f"{source.name} needs more than {format_bytes(cap_bytes)} before its first step, whatever its batch: "
            f"{ended.outcome.message}",
            f"raise --memory-limit, or have it need less until it trains; its log is {ended.log_path}",
        )

    def _next_control(self, step: Step) -> Candidate | None:
        """Return the fastest reused candidate, to measure it again before a new trial is compared with reused ones.

        If possible it needs no compilation. ``None`` where no earlier measurement is reused, the next step is reused
        too, or a candidate was measured again already.
        """
        if self._library is None or self._control is not None or self._request.objective != "throughput":
            return None
        taken = [t for t in self._plan.records.values() if t.stage == "reused" and isinstance(t.outcome, Completed)]
        effort = effort_of(self._request, step.candidate, step.stage, self._plan.best(), self._history)
        if not taken or self._reusable_outcome(step.candidate, step.stage, effort) is not None:
            return None
        candidates = {t.candidate for t in taken}
        plain = {candidate for candidate in candidates if not candidate.arm.torch_compile}
        fastest = self._history.fastest(plain) or self._history.fastest(candidates)
        self._control = fastest.candidate if fastest is not None else None
        return self._control

    def _drop_reused_if_speed_differs(self, ended: TrialRecord, expected: Speed) -> None:
        """Drop the reused speeds, and reuse no more trials, where the control is not as fast as ``expected``.

        That is, by more than the interval of ``expected`` and ``_SAME_SPEED``. Reused trials out of memory stay.
        """
        if self._library is None or not isinstance(ended.outcome, Completed) or self._plan.again.owed:
            return
        ratio = ended.outcome.measurement.samples_per_second / expected.samples_per_second
        if abs(math.log(ratio)) <= max(expected.next_process.half_width(), _SAME_SPEED):
            return
        self._library = None
        self._store.drop_reused_trials(self._study.id)
        self._plan.drop_reused()
        self._observer.note(
            f"trials of earlier searches are not used: {ended.candidate.describe()} is {ratio:.2f} × as fast as then"
        )

    def _reusable_outcome(self, candidate: Candidate, stage: Stage, effort: Effort) -> Outcome | None:
        """Return a candidate's outcome from a trial of earlier studies that is not reused yet; ``None`` without one."""
        if self._library is None:
            return None
        # A reused outcome names the process that measured it.
        reused = {tried.process for tried in self._history.outcomes_of(candidate)}
        return self._library.answer(candidate, effort, in_full=stage == "final", not_from=reused)


def _no_result(history: History, request: SearchRequest, stop: Stop, *, log_folder: Path) -> AutotuneError:
    """Return the error that explains why a search has nothing to recommend."""
    # Whether no other candidate is left that might fit.
    is_certain = stop.reason is StopReason.NOTHING_LEFT
    tried, ceiling = history.tried, history.ceiling
    failed = [t.outcome for t in tried if isinstance(t.outcome, Failed)]
    if not any(history.is_over(t) for t in tried):
        if failed:
            return NoResultError(
                f"no candidate of the search space completed; the last one failed: {failed[-1].message}",
                f"its log is in {log_folder}",
            )
        if not is_certain:
            return NoResultError(f"no candidate was run: {stop.sentence}", "raise --trials or --time-budget")
    reused = sum(source_of(t.outcome) is not None for t in tried)
    run = len(tried) - reused
    return NothingFitsError(
        f"nothing {'' if is_certain else 'that was tried '}fits under {format_bytes(ceiling.line_bytes)} "
        f"({format_bytes(ceiling.cap_bytes)} less headroom); {plural(run, 'trial')} "
        f"{'was' if run == 1 else 'were'} run"
        + (f", {reused} reused" if reused else "")
        + (f", {len(failed)} of them failed" if failed else ""),
        _what_may_help(request, is_certain=is_certain),
    )


def _what_may_help(request: SearchRequest, *, is_certain: bool) -> str:
    """Return advice after a search in which nothing fits; ``is_certain``: no candidate was left to try."""
    workload = request.workload
    ways = [
        ("search on with the same --study and more --trials or --time-budget", not is_certain),
        ("raise --memory-limit", request.memory_limit_bytes is not None),
        ("free memory on the device or take a larger one", request.memory_limit_bytes is None),
        ("shorten --seq-len", workload.is_text),
        ("allow --gradient-checkpointing auto", request.gradient_checkpointing == "off"),
        *((f"add --lever {name}=on", True) for name in request.untried_resorts()),
        ("leave --batch-multiple out", (request.batch_multiple or 1) > 1),
    ]
    return ", or ".join(way for way, is_open in ways if is_open)
