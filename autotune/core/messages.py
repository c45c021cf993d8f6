"""Describe what the controller (the process of a search) and a trial server tell each other: jobs, progress, answers.

Each message is a line of JSON. The trial server has torch loaded, and starts the processes of a job by fork.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from autotune.core.candidate import Candidate
from autotune.core.code_interface import Protection
from autotune.core.look import LookWork
from autotune.core.outcome import Effort
from autotune.core.placement import RankDevices
from autotune.core.prediction import ArmsToTrace, PredictionWork
from autotune.core.rehearsal import RehearsalWork
from autotune.core.schema import decode, encode
from autotune.core.units import format_seconds
from autotune.core.workload import Workload


@dataclass(frozen=True, slots=True)
class Problem:
    """What keeps a job from its result, such as an error of the user's input: what is wrong, and what to do next."""

    message: str
    hint: str = ""


# A phase or step that takes longer is shown with its time. A choice.
_LONG_SECONDS = 10.0

# What a trial does in each of its phases, in words. The names of the phases are keys of JSON documents.
_DOING = {
    "start": "starting its process",
    "device": "opening the device",
    "data": "opening the data",
    "model": "building the model",
    "trainer": "making the Trainer",
    "build": "calling your function",
    "script": "running your script",
    "loop": "running your loop",
    "train": "running the first step",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a running job: the phase that it entered, or the step that it ended."""

    phase: str | None = None
    step: int | None = None
    of: int | None = None
    """The most steps that it may run; it ends earlier once it has measured enough."""

    def describe(self, seconds: float = 0.0) -> str:
        """Return in a few words what the job does now. ``seconds`` is the time since it reported this.

        ``building the model``, ``building the model for 42 s``, ``step 7 of at most 14`` or ``step 7, 42 s ago``.
        """
        is_long = seconds >= _LONG_SECONDS
        if self.phase is None:
            ago = f", {format_seconds(seconds)} ago" if is_long else ""
            most = "" if self.of is None else f" of at most {self.of}"
            return f"step {'?' if self.step is None else self.step}{most}{ago}"
        return f"{_DOING.get(self.phase, self.phase)}{f' for {format_seconds(seconds)}' if is_long else ''}"


@dataclass(frozen=True, slots=True)
class JobLine:
    """A line that a process of a job writes: ``progress`` while it works, at the end a ``result`` or a ``problem``."""

    progress: Progress | None = None
    result: Any = None
    problem: Problem | None = None
    at: float | None = None
    """When one of several ranks wrote it, on the clock that all processes share."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The message that a trial server can take jobs."""

    ready: int
    """Its process id."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The message that an idle trial server now serves another search."""

    adopted: int
    """Its process id."""


@dataclass(frozen=True, slots=True)
class ImportFailed:
    """The message that a trial server cannot import what it needs, and ends."""

    import_error: str
    """The innermost error, which caused the others."""
    package: str | None = None
    """The package whose import failed, where that is neither torch nor transformers."""


@dataclass(frozen=True, slots=True)
class Started:
    """The message that the processes of a job have been started."""

    started: str
    """The job's id."""
    pids: tuple[int, ...]
    """One for each rank."""
    folder: str
    """The job's temporary folder, which the trial server removes at the end."""


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """The progress of a job."""

    progress: Progress
    id: str
    """The job's id."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a job: its result, if there is one, and how its process ended.

    The last four fields are added by the controller.
    """

    result: Any = None
    """Of a trial its outcome, of other jobs what they found out, as JSON. The controller decodes it."""
    problem: Problem | None = None
    """Why there is no result, where the job itself, or a process that stopped it, says so."""
    malformed: str | None = None
    """Without a result: the beginning of a line that the process wrote and that is no ``JobLine``."""
    refused: str | None = None
    """Why no process could be started."""
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    rank: int | None = None
    """Of several ranks, the one that failed first."""
    during: str = ""
    """The phase that the job entered last."""
    lost: bool = False
    """The trial server died or was given up."""
    overdue: bool = False
    """The time limit of the job is over, and the trial server has said nothing."""
    last_words: str = ""
    """For a process beside the trials that gave no result: the last line of its log."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The message that the processes of a job are gone, or could not be started."""

    ended: str
    """The job's id."""
    answer: Answer


ServerLine = Ready | Adopted | ImportFailed | Started | ProgressLine | Ended
_LINES: dict[str, type[ServerLine]] = {dataclasses.fields(kind)[0].name: kind for kind in get_args(ServerLine)}
"""The type of each line, by the name of its first field."""


def server_line(document: dict[str, Any]) -> ServerLine:
    """Return the typed message of a line from a trial server. Raises ``ValueError`` where it is malformed."""
    kind = next((kind for name, kind in _LINES.items() if name in document), None)
    if kind is None:
        raise ValueError(f"malformed line: it has none of the fields {', '.join(_LINES)}")
    return decode(document, kind)


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
    """For the user's own code, the arms whose memory is to be predicted; ``None`` where nothing is predicted."""


@dataclass(frozen=True, slots=True)
class DataWork:
    """Read the workload's dataset into a folder, from which trials map it into memory."""

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
    """Work for a process that the trial server starts, or for one process per rank."""

    id: str
    workload: Workload
    work: Work
    timeout_seconds: float
    log_path: str
    protection: Protection | None = None
    """What protects the user's files from the user's own code; ``None`` for other jobs."""

    @property
    def kind(self) -> str:
        """The kind of work: ``trial``, ``look``, ``rehearse``, ``inspect``, ``read_data`` or ``predict``."""
        return next(name for name, kind in _KINDS.items() if isinstance(self.work, kind))

    @property
    def ranks(self) -> int:
        """The number of processes that run the job together.

        The user's own code is inspected on all ranks, since it may read its rank, or wait for the others. A function of
        ``--loop`` is inspected on one, since it is measured on one rank only.
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
