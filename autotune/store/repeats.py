"""Decide which trials say nothing of their candidate, so that it is run again, and how often."""

from __future__ import annotations

from autotune.core.candidate import Candidate
from autotune.core.outcome import TRANSIENT, Completed, Failed, OutOfMemory
from autotune.store import Stage, TrialRecord

# The search was killed: hardly ever the candidate's doing, but one that takes the machine down must not do so for ever.
_MOST_INTERRUPTIONS = 10
_MOST_FAULTS = 1
# A measurement beside a neighbour is better than none, and a neighbour that stays disturbs every one of them.
_MOST_DISTURBANCES = 2
_MOST_DISTURBANCES_IN_ALL = 10


class Repeats:
    """Goes through a study's trials in order; the same whether they are seen as they end or read from the record."""

    def __init__(self) -> None:
        self._set_aside: dict[tuple[Candidate, str], list[TrialRecord]] = {}
        self._owed: dict[Candidate, Stage] = {}
        self._disturbances = 0
        self.excused = 0
        """Trials that do not count, neither for their candidate nor against a budget of trials."""

    @property
    def owed(self) -> list[tuple[Stage, Candidate]]:
        """What has to be run again before anything else."""
        return [(stage, candidate) for candidate, stage in self._owed.items()]

    def take(self, trial: TrialRecord) -> TrialRecord | None:
        """Return the trial that speaks for the candidate, this or an earlier one; ``None`` where it is run again."""
        kind = _kind(trial)
        if kind is None:
            self._owed.pop(trial.candidate, None)
            return trial
        before = self._set_aside.setdefault((trial.candidate, kind), [])
        if len(before) >= _MOST[kind] or (kind == "disturbed" and self._disturbances >= _MOST_DISTURBANCES_IN_ALL):
            self._owed.pop(trial.candidate, None)
            # Whatever disturbs a measurement makes it slower, so the fastest was disturbed least.
            return max([trial, *before], key=_speed)
        before.append(trial)
        self._disturbances += kind == "disturbed"
        self.excused += 1
        self._owed.setdefault(trial.candidate, trial.stage)
        return None


_MOST = {"interrupted": _MOST_INTERRUPTIONS, "fault": _MOST_FAULTS, "disturbed": _MOST_DISTURBANCES}


def _kind(trial: TrialRecord) -> str | None:
    """Why a trial that ended may say nothing of its candidate; ``None`` where it says what it says."""
    match trial.outcome:
        case Failed(reason="interrupted"):
            return "interrupted"
        case Failed(reason=reason) if reason in TRANSIENT:
            return "fault"
        case Completed(disturbed=why, run_again=True) | OutOfMemory(disturbed=why) if why:
            return "disturbed"
    return None


def _speed(trial: TrialRecord) -> float:
    """Samples a second; of trials that did not complete the last is as good as any."""
    return trial.outcome.measurement.samples_per_second if isinstance(trial.outcome, Completed) else 0.0
