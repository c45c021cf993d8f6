"""Define the records of the database as frozen values, independent of its tables."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from autotune.core.candidate import Candidate, Document
from autotune.core.look import Look
from autotune.core.outcome import Outcome
from autotune.core.stop import LeftOut, StopReason

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
    """Unique."""
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
    """What the look at the winner's training found; ``None`` before it, and in studies of versions without one."""
    best_trial_id: str | None = None
    baseline_trial_id: str | None = None
    started_at: datetime = field(default_factory=now)
    ended_at: datetime | None = None
    seconds: float = 0.0
    """Time spent on the search, summed over every time it was resumed."""


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial. Without an outcome it is running, or was when its process was killed."""

    study_id: str
    number: int
    """Of the trial within the study, from 0. Numbers are missing where an older version recorded what was not run."""
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
    """A trial of another study with the same environment and workload."""

    trial: TrialRecord
    study: str
    """The name of that study."""
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
