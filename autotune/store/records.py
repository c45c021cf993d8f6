"""Define the records of the database, independent of its tables: why a search ended, which trials are run again."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from autotune.core.candidate import Candidate, Document
from autotune.core.look import Look
from autotune.core.outcome import TRANSIENT, Completed, Failed, Outcome, OutOfMemory


class StopReason(StrEnum):
    """What ended a search."""

    NOTHING_LEFT = "nothing_left"
    """No remaining candidate was worth a trial."""
    TRIALS = "trials"
    """The budget of trials was spent."""
    TIME = "time"
    """The time budget was spent."""
    NOTHING_NEW = "nothing_new"
    """One of Optuna's samplers proposed nothing new, many times in a row."""
    INTERRUPTED = "interrupted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a search ended."""

    reason: StopReason
    sentence: str
    """The reason in words, with its figures."""


NOTHING_LEFT = Stop(StopReason.NOTHING_LEFT, "no remaining candidate is worth a trial")
INTERRUPTED = Stop(StopReason.INTERRUPTED, "interrupted")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Arms that had no trial, for one reason."""

    arms: tuple[str, ...]
    """Each as ``Arm.describe`` names it, or ``all fp16`` for several that have it in common."""
    reason: str

    def describe(self) -> str:
        """Return arms and reason: ``all fp16; tf32, checkpointing: fp16 is never faster than bf16``."""
        return f"{'; '.join(self.arms)}: {self.reason}"


StudyState = Literal["running", "finished", "interrupted"]
Stage = Literal["search", "final", "baseline", "reused"]
TrialState = Literal["running", "completed", "out_of_memory", "failed"]


def new_id() -> str:
    """Return a new identifier: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def now() -> datetime:
    """Return the current time in UTC, as every timestamp here."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """One search: its request, its memory ceiling, and how it ended."""

    name: str
    """Unique in the database."""
    workload_id: str
    environment_id: str
    request: Document
    ceiling: Document
    autotune_version: str
    id: str = field(default_factory=new_id)
    state: StudyState = "running"
    stop_reason: StopReason | None = None
    stopped_because: str | None = None
    """The reason in words, with its figures."""
    left_out: tuple[LeftOut, ...] = ()
    """The arms that had no trial, where the search ended because nothing was worth one."""
    look: Look | None = None
    """What the look, which compares the winner's first step with that of the training asked for, found; ``None``
    before it, and in studies of versions without one."""
    best_trial_id: str | None = None
    baseline_trial_id: str | None = None
    started_at: datetime = field(default_factory=now)
    ended_at: datetime | None = None
    seconds: float = 0.0
    """Time spent on the search, summed over every time it was resumed."""


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial. Without an outcome it is running, or was running when the search was killed."""

    study_id: str
    number: int
    """Counts the study's trials from 0. Some are missing where older versions numbered candidates that were not run."""
    candidate: Candidate
    workload_id: str
    environment_id: str
    stage: Stage = "search"
    id: str = field(default_factory=new_id)
    started_at: datetime = field(default_factory=now)
    outcome: Outcome | None = None
    log_path: str | None = None
    seconds: float | None = None
    """From start to outcome, as the controlling process measured it."""

    @property
    def state(self) -> TrialState:
        """The outcome's state; ``running`` where there is none yet."""
        return "running" if self.outcome is None else self.outcome.state


@dataclass(frozen=True, slots=True)
class PastTrial:
    """A trial of the same workload in another study or another environment."""

    trial: TrialRecord
    study: str
    """The name of the trial's study."""
    ceiling: Document
    """The memory ceiling that the trial had."""


@dataclass(frozen=True, slots=True)
class StudySummary:
    """A study with the facts that a list of studies shows."""

    study: StudyRecord
    workload: Document
    environment: Document
    running: int
    completed: int
    out_of_memory: int
    failed: int
    best: TrialRecord | None

    @property
    def trials(self) -> int:
        """Number of trials that were started, in any state."""
        return self.running + self.completed + self.out_of_memory + self.failed


# An interruption is hardly ever caused by the candidate. But one that crashes the machine must not run again forever.
_MOST_INTERRUPTIONS = 10
_MOST_FAULTS = 1
# Repeats after a disturbance. A disturbed measurement is better than none, and some disturbances never end.
_MOST_DISTURBANCES = 2
_MOST_DISTURBANCES_IN_ALL = 10


class Repeats:
    """Decides from a study's trials, taken in order, which trials count and which candidates are run again.

    A trial that was interrupted, failed by an outside cause, or was disturbed (others used the CPU or the GPU) is set
    aside a few times. It needs the recorded trials only, so that a resumed search decides as before.
    """

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
        """Take the next ended trial; return the one that counts for its candidate, this or an earlier one.

        ``None`` where the candidate has to be run again: it is in ``owed`` until then.
        """
        kind = _kind_of_repeat(trial)
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


def _kind_of_repeat(trial: TrialRecord) -> str | None:
    """Return why an ended trial says nothing about its candidate, a key of ``_MOST``; ``None`` for a valid trial."""
    match trial.outcome:
        case Failed(reason="interrupted"):
            return "interrupted"
        case Failed(reason=reason) if reason in TRANSIENT:
            return "fault"
        case Completed(disturbed=why, run_again=True) | OutOfMemory(disturbed=why) if why:
            return "disturbed"
    return None


def _speed(trial: TrialRecord) -> float:
    """Return the speed of a trial in samples a second; 0 where it did not complete."""
    return trial.outcome.measurement.samples_per_second if isinstance(trial.outcome, Completed) else 0.0
