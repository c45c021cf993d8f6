"""Decide which trials are run again because they were interrupted, disturbed or failed by chance, and how often."""

from __future__ import annotations

from autotune.core.candidate import Candidate
from autotune.core.outcome import TRANSIENT, Completed, Failed, OutOfMemory
from autotune.store.records import Stage, TrialRecord

# An interruption is hardly ever caused by the candidate. One that crashes the machine must not be repeated forever.
_MOST_INTERRUPTIONS = 10
_MOST_FAULTS = 1
# Repeats after a disturbance. A disturbed measurement is better than none, and some disturbances never end.
_MOST_DISTURBANCES = 2
_MOST_DISTURBANCES_IN_ALL = 10


class Repeats:
    """Takes a study's trials in order; the result is the same during the search and when read from the record."""

    def __init__(self) -> None:
        self._set_aside: dict[tuple[Candidate, str], list[TrialRecord]] = {}
        self._owed: dict[Candidate, Stage] = {}
        self._disturbances = 0
        self.excused = 0
        """Number of trials that do not count, neither for their candidate nor against a budget of trials."""

    @property
    def owed(self) -> list[tuple[Stage, Candidate]]:
        """Candidates to run again before anything else."""
        return [(stage, candidate) for candidate, stage in self._owed.items()]

    def take(self, trial: TrialRecord) -> TrialRecord | None:
        """Return the trial that counts for the candidate, this or an earlier one; ``None`` to run it again."""
        kind = _kind(trial)
        if kind is None:
            self._owed.pop(trial.candidate, None)
            return trial
        before = self._set_aside.setdefault((trial.candidate, kind), [])
        if len(before) >= _MOST[kind] or (kind == "disturbed" and self._disturbances >= _MOST_DISTURBANCES_IN_ALL):
            self._owed.pop(trial.candidate, None)
            # A disturbance slows a measurement down, so the fastest was disturbed least.
            return max([trial, *before], key=_speed)
        before.append(trial)
        self._disturbances += kind == "disturbed"
        self.excused += 1
        self._owed.setdefault(trial.candidate, trial.stage)
        return None


_MOST = {"interrupted": _MOST_INTERRUPTIONS, "fault": _MOST_FAULTS, "disturbed": _MOST_DISTURBANCES}


def _kind(trial: TrialRecord) -> str | None:
    """Return why a trial that ended says nothing about its candidate; ``None`` for a valid trial."""
    match trial.outcome:
        case Failed(reason="interrupted"):
            return "interrupted"
        case Failed(reason=reason) if reason in TRANSIENT:
            return "fault"
        case Completed(disturbed=why, run_again=True) | OutOfMemory(disturbed=why) if why:
            return "disturbed"
    return None


def _speed(trial: TrialRecord) -> float:
    """Return the samples a second of a trial; 0 where it did not complete."""
    return trial.outcome.measurement.samples_per_second if isinstance(trial.outcome, Completed) else 0.0
