"""The search: ask for a candidate, run it, take down what came of it, until enough is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.errors import AutotuneError
from autotune.core.outcome import Effort, Failed, Outcome, process_of
from autotune.core.stop import INTERRUPTED, NOTHING_LEFT, LeftOut, Stop, StopReason
from autotune.estimate.history import History, cap_of
from autotune.estimate.memory_jobs import Forecast
from autotune.estimate.throughput import Speeds
from autotune.execution.executor import TrialJob
from autotune.store import Stage, Store, StudyRecord, TrialRecord, now
from autotune.tuning.interruption import Interruption
from autotune.tuning.optuna_study import Asked, OptunaStudy
from autotune.tuning.plan import Plan
from autotune.tuning.policy import make_policy
from autotune.tuning.prepare import Prepared
from autotune.tuning.remeasure import effort_of, timeout_seconds
from autotune.tuning.reuse import Library
from autotune.tuning.sampler import candidate_of, distributions, make_sampler
from autotune.tuning.studies import no_result, open_study


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
        self._library: Library | None = None
        self._level = prepared.space.batches.levels()[0]
        self._clock = clock
        self._started = clock()

    def run(self) -> StudyRecord:
        """Search to the end; the study as it stands then.

        Raises ``NothingFitsError`` when no candidate stays under the ceiling and ``NoResultError``
        when none completed for other reasons; what was tried is recorded all the same.
        """
        self._open()
        space = distributions(self._prepared.space, self._prepared.baseline, self._request.sampler)
        sampler = make_sampler(self._request.sampler, self._policy, self._history, space, self._request.seed)
        objective, ceiling = self._request.objective, self._prepared.ceiling
        self._optuna = OptunaStudy(self._study.name, self._store, sampler, space, objective, ceiling)
        self._optuna.settle(self._plan.records)
        self._observer.begins(self._prepared, self._study)
        stop = INTERRUPTED
        try:
            stop = self._loop()
        except AutotuneError as error:
            stop = Stop(StopReason.ERROR, error.message)
            raise
        finally:
            self._close_study(stop)
        if self._study.state == "finished":
            self._check_result(stop)
        return self._study

    # The study

    def _open(self) -> None:
        opened = open_study(self._prepared, self._store)
        self._study, self._prepared = opened.study, opened.prepared
        self._history.ceiling = self._prepared.ceiling
        request, spent_seconds = self._request, opened.study.seconds + self._clock() - self._started
        self._policy = make_policy(request.sampler, request.objective, self._prepared.space)
        self._plan = Plan(self._prepared, self._history, self._policy, self._clock, spent_seconds)
        for trial in opened.trials:
            self._plan.take(trial)
        for note in opened.notes:
            self._observer.note(note)
        # Code of the user's may import and read what has changed since.
        if not self._request.fresh and self._request.workload.source is None:
            past, memory = self._store.past_trials(self._study), self._history.memory
            self._library = Library(past, self._prepared.ceiling, memory)

    def _close_study(self, stop: Stop) -> None:
        # A signal may come between a trial's record and its run, or while its end is written.
        self._store.lose_running_trials(self._study.id, "the search was stopped during this trial")
        best, baseline = self._plan.best(), self._plan.baseline()
        self._study = replace(
            self._study,
            state="interrupted" if stop.reason in (StopReason.INTERRUPTED, StopReason.ERROR) else "finished",
            stop_reason=stop.reason,
            stopped_because=stop.sentence,
            left_out=self._left_out(stop),
            best_trial_id=best.trial_id if best else None,
            baseline_trial_id=baseline.trial_id if baseline else None,
            ended_at=now(),
            seconds=self._plan.elapsed_seconds(),
        )
        self._store.update_study(self._study)

    def _left_out(self, stop: Stop) -> tuple[LeftOut, ...]:
        """Return which arms had no trial, and why, where the search ended because nothing was worth one."""
        if stop != NOTHING_LEFT or self._request.objective != "throughput":
            return ()
        return Speeds(self._prepared.space, self._history).left_out_arms()

    def _check_result(self, stop: Stop) -> None:
        """Raise where there is nothing to recommend, and say why."""
        if self._plan.best() is None:
            raise no_result(self._history, self._request, stop, log_folder=self._log_folder)

    # The loop

    def _loop(self) -> Stop:
        """Run trials until there is a reason to stop, and return it."""
        while True:
            stop = INTERRUPTED if self._interruption.asked else self._plan.exhausted()
            if stop is not None:
                return stop
            self._look_ahead()
            step = self._plan.next()
            if step is None:
                return self._plan.done() or NOTHING_LEFT
            if step.candidate is None:
                self._try_proposal(self._optuna.ask())
                continue
            if step.proposed:
                self._say_level(step.candidate)
            # What the policy proposes, Optuna's sampler proposes too, since it asks the same policy.
            asked = self._optuna.ask(None if step.proposed else step.candidate, step.stage)
            self._run_trial(asked, step.candidate, step.stage)

    def _try_proposal(self, asked: Asked) -> None:
        """Run what one of Optuna's samplers proposed, unless it need not be run."""
        candidate = candidate_of(asked.params, self._prepared.space)
        refusal = self._plan.judge(candidate)
        if candidate is None or refusal is not None:
            self._optuna.skip(asked, refusal.why if refusal else "", refusal.known if refusal else None)
            return
        self._say_level(candidate)
        self._run_trial(asked, candidate, "search")

    def _look_ahead(self) -> None:
        """Predict memory beside the baseline, which needs none, unless images are fed; then what the next arm needs.

        Nothing else is timed beside predictions.
        """
        forecast = self._forecast
        if forecast is None or forecast.is_complete:
            return
        step = self._plan.next()
        if step is not None and not step.proposed:
            if step.stage == "baseline" and self._request.workload.is_text:
                forecast.begin(self._upcoming_arm())
            return
        if self._policy is not None:
            forecast.settle(self._upcoming_arm)
        else:
            forecast.complete()

    def _upcoming_arm(self) -> Arm | None:
        upcoming = self._plan.upcoming()
        return upcoming.arm if upcoming is not None else None

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
        effort = effort_of(request, candidate, stage, self._plan.best(), self._history)
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
            timeout_seconds=timeout_seconds(request, candidate, effort, self._history),
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
        self._plan.take(ended)
        self._observer.trial_ends(ended, self._history)

    def _known(self, candidate: Candidate, stage: Stage, effort: Effort) -> Outcome | None:
        """What a trial would show, where earlier studies tell. A second measurement is a process of its own."""
        if self._library is None:
            return None
        known = {process_of(t.trial_id, t.outcome) for t in self._history.outcomes_of(candidate)}
        return self._library.answer(candidate, effort, in_full=stage == "final", not_from=known)

    def _reuse(self, asked: Asked, record: TrialRecord, outcome: Outcome) -> None:
        """Take an earlier trial's outcome for that of this one."""
        ended = replace(record, stage="reused", outcome=outcome, seconds=0.0, log_path=None)
        self._optuna.describe(asked, ended.candidate, outcome)
        self._store.start_trial(ended)
        self._optuna.tell(asked, ended.candidate, outcome)
        self._plan.take(ended)
        self._observer.trial_ends(ended, self._history)
