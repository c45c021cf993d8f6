"""Write what happens in a search to both of its records: autotune's tables and Optuna's study."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.look import Look
from autotune.core.outcome import Failed, Outcome
from autotune.core.stop import LeftOut, Stop, StopReason
from autotune.store.records import StudyRecord, TrialRecord, now
from autotune.store.repository import Store
from autotune.tuning.optuna_study import OptunaStudy, OptunaTrial


class StudyRecorder:
    """The records of one study while it is searched."""

    def __init__(self, study: StudyRecord, store: Store, optuna_study: OptunaStudy) -> None:
        self.study = study
        """The study as it was last written."""
        self._store = store
        self._optuna = optuna_study

    def finish(self, trial: OptunaTrial, record: TrialRecord, outcome: Outcome, seconds: float) -> TrialRecord:
        """Record how a trial ended; return it with its end.

        Killed between any two of these, the next run of the study can still set right what is missing.
        """
        self._optuna.describe(trial, record.candidate, outcome)
        self._store.finish_trial(record.id, outcome, seconds)
        self._optuna.tell(trial, record.candidate, outcome)
        return replace(record, outcome=outcome, seconds=seconds)

    def reuse(self, trial: OptunaTrial, record: TrialRecord, outcome: Outcome) -> TrialRecord:
        """Record an earlier trial's outcome as that of this one, which need not run; return it with its end."""
        ended = replace(record, stage="reused", outcome=outcome, seconds=0.0, log_path=None)
        self._optuna.describe(trial, ended.candidate, outcome)
        self._store.start_trial(ended)
        self._optuna.tell(trial, ended.candidate, outcome)
        return ended

    def refuse(self, trial: TrialRecord) -> None:
        """Record that a trial which completed is of another training."""
        assert isinstance(trial.outcome, Failed)
        self._store.refuse_trial(trial.id, trial.outcome)

    def keep_look(self, look: Look) -> None:
        """Record what the look before the answer found; it is written with the end of the search."""
        self.study = replace(self.study, look=look)

    def keep_best(self, best_trial_id: str | None, baseline_trial_id: str | None, seconds: float) -> None:
        """Record the best trial so far of a search that goes on."""
        self.study = replace(
            self.study, best_trial_id=best_trial_id, baseline_trial_id=baseline_trial_id, seconds=seconds
        )
        self._store.update_study(self.study)

    def close(
        self,
        stop: Stop,
        *,
        left_out: tuple[LeftOut, ...],
        best_trial_id: str | None,
        baseline_trial_id: str | None,
        seconds: float,
    ) -> None:
        """Record the end of the search."""
        # A signal may come between a trial's record and its run, or while its end is written.
        self._store.lose_running_trials(self.study.id, "the search was stopped during this trial")
        self.study = replace(
            self.study,
            state="interrupted" if stop.reason in (StopReason.INTERRUPTED, StopReason.ERROR) else "finished",
            stop_reason=stop.reason,
            stopped_because=stop.sentence,
            left_out=left_out,
            best_trial_id=best_trial_id,
            baseline_trial_id=baseline_trial_id,
            ended_at=now(),
            seconds=seconds,
        )
        self._store.update_study(self.study)
