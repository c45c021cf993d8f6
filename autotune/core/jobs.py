"""Describe the jobs that the trial server runs: a trial, a look, a rehearsal, an inspection and others.

The controller sends a job as a line of JSON. The server decodes it once, and the process of the job gets the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.look import LookWork
from autotune.core.outcome import Effort
from autotune.core.placement import RankDevices
from autotune.core.prediction import ArmsToTrace, PredictionWork
from autotune.core.protection import Protection
from autotune.core.rehearsal import RehearsalWork
from autotune.core.schema import decode, encode
from autotune.core.workload import Workload


@dataclass(frozen=True, slots=True)
class TrialWork:
    """Train with a candidate's settings and measure; the result is an outcome."""

    candidate: Candidate
    devices: RankDevices
    cap_bytes: int
    effort: Effort
    seed: int
    unmodified: bool = False
    """Run the user's own code with its own settings, not the candidate's."""
    data_folder: str | None = None
    """The folder of the dataset that was read; ``None`` without one."""


@dataclass(frozen=True, slots=True)
class InspectionWork:
    """Find out what a search needs to know of the environment and the model."""

    devices: RankDevices
    arms: ArmsToTrace | None = None
    """Of the user's own code, arms whose memory is traced; ``None`` where nothing is predicted."""


@dataclass(frozen=True, slots=True)
class DataWork:
    """Read the workload's dataset into a folder, from which trials map it."""

    folder: str


Work = TrialWork | LookWork | RehearsalWork | InspectionWork | DataWork | PredictionWork

_KINDS: dict[str, type[Work]] = {
    "trial": TrialWork,
    "look": LookWork,
    "rehearse": RehearsalWork,
    "inspect": InspectionWork,
    "read_data": DataWork,
    "predict": PredictionWork,
}


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a process of the trial server, or for one process a rank."""

    id: str
    workload: Workload
    work: Work
    timeout_seconds: float
    log_path: str
    protection: Protection | None = None
    """What keeps the user's own code from their files; ``None`` for other jobs."""

    @property
    def kind(self) -> str:
        """The kind of work: ``trial``, ``look``, ``rehearse``, ``inspect``, ``read_data`` or ``predict``."""
        return next(name for name, kind in _KINDS.items() if isinstance(self.work, kind))

    @property
    def ranks(self) -> int:
        """The number of processes that run the job together.

        The user's own code is inspected on all ranks, since it may read its rank, or wait for the others. A function of
        ``--loop`` is measured on one rank only.
        """
        source = self.workload.source
        match self.work:
            case TrialWork(devices=devices) | RehearsalWork(devices=devices):
                return devices.ranks
            case InspectionWork(devices=devices) if source is not None and source.kind != "loop":
                return devices.ranks
            case _:
                return 1

    def document(self) -> dict[str, Any]:
        """Return the job as JSON-ready data."""
        document: dict[str, Any] = encode(self)
        return {"kind": self.kind, **document}

    @classmethod
    def from_document(cls, document: Any) -> Job:
        """Return the job of a document from ``document``. Raises ``ValueError`` where the document is malformed."""
        message = decode(document, JobMessage)
        kind = _KINDS.get(message.kind)
        if kind is None:
            raise ValueError(f"malformed job: its kind is {message.kind!r}, not one of {', '.join(_KINDS)}")
        workload = Workload.from_document(message.workload)
        work = decode(message.work, kind)
        if workload.source is not None and message.protection is None and not isinstance(work, PredictionWork):
            raise ValueError("malformed job: it runs the user's own code, and says nothing of its protection")
        return cls(message.id, workload, work, message.timeout_seconds, message.log_path, message.protection)


@dataclass(frozen=True, slots=True)
class JobMessage:
    """A job as it is sent. Which fields ``work`` has depends on ``kind``."""

    kind: str
    id: str
    workload: dict[str, Any]
    work: dict[str, Any]
    timeout_seconds: float
    log_path: str
    protection: Protection | None = None
