"""Describe what a trial server and the processes of its jobs tell the controller, each in a line of JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from autotune.core.dataset_spec import DataFacts
from autotune.core.schema import decode
from autotune.core.units import format_seconds


@dataclass(frozen=True, slots=True)
class Problem:
    """An error of the user's input that a job found: what is wrong, and what to do next."""

    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class DataAnswer:
    """The result of reading a dataset: its facts, or why it cannot be used."""

    facts: DataFacts | None = None
    problem: Problem | None = None


# What takes longer is told with its time. A choice.
_LONG_SECONDS = 10.0

# What a trial does in each of its phases. The phases themselves are keys of JSON documents.
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
    """The most steps that it may run; it ends earlier once they say enough."""

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
class ProgressLine:
    """What the process of a job says under way."""

    progress: Progress
    at: float | None = None
    """When one of several ranks said it, on the clock that all processes share."""
    id: str | None = None
    """The job's, which the trial server adds."""


@dataclass(frozen=True, slots=True)
class ResultLine:
    """What the process of a job says at its end."""

    result: Any
    at: float | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class MalformedLine:
    """The beginning of something else that the process of a job wrote."""

    malformed: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A trial server can take jobs."""

    ready: int
    """Its process id."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """An idle trial server serves another search."""

    adopted: int
    """Its process id."""


@dataclass(frozen=True, slots=True)
class ImportFailed:
    """A trial server cannot import what it needs, and ends."""

    import_error: str
    """The first of the errors that led to it."""
    package: str | None = None
    """The package whose import failed, where that is neither torch nor transformers."""


@dataclass(frozen=True, slots=True)
class Started:
    """A job has processes."""

    started: str
    """The job's id."""
    pids: tuple[int, ...]
    """One for each rank."""
    folder: str
    """The job's own, which the trial server removes at the end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The processes of a job are gone, or it could have none."""

    ended: str
    """The job's id."""
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    refused: str | None = None
    """Why no process could be started."""
    rank: int | None = None
    """Of several ranks, the one that failed first."""


ServerLine = Ready | Adopted | ImportFailed | Started | Ended | ProgressLine | ResultLine | MalformedLine
_LINES: dict[str, type[ServerLine]] = {
    "ready": Ready,
    "adopted": Adopted,
    "import_error": ImportFailed,
    "started": Started,
    "ended": Ended,
    "progress": ProgressLine,
    "result": ResultLine,
    "malformed": MalformedLine,
}
"""By the first field of each."""


def server_line(document: dict[str, Any]) -> ServerLine:
    """Return the typed message of a line from a trial server.

    The user's own code may write into the pipe of its job, so the line of a job may hold anything.
    """
    kind = next((kind for name, kind in _LINES.items() if name in document), MalformedLine)
    try:
        return decode(document, kind)
    except ValueError:
        return MalformedLine(str(document.get("progress", document))[:200], document.get("id"))


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a job: its result, if there is one, and how its process ended."""

    result: Any = None
    """Of a trial its outcome, of other kinds of jobs what they found out; checked by who asked for it."""
    during: str = ""
    """The phase that it entered last."""
    malformed: str | None = None
    """The beginning of a line that is no message."""
    refused: str | None = None
    """Why no process could be started."""
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    rank: int | None = None
    """Of several ranks, the one that failed first."""
    lost: bool = False
    """The trial server died or was given up."""
    overdue: bool = False
    """The trial server said nothing beyond the time limit of the job."""
    last_words: str = ""
    """Of a process beside the trials that gave no result: the last line of its log."""

    def after(self, line: ServerLine) -> Answer:
        """Return this answer completed by another line of the trial server."""
        match line:
            case ProgressLine(Progress(phase)):
                return self if phase is None else dataclasses.replace(self, during=phase)
            case ResultLine(result):
                return dataclasses.replace(self, result=result)
            case MalformedLine(malformed):
                return dataclasses.replace(self, malformed=malformed)
            case Ended(_, exit_code, signal, timed_out, refused, rank):
                return dataclasses.replace(
                    self, exit_code=exit_code, signal=signal, timed_out=timed_out, refused=refused, rank=rank
                )
            case _:
                return self
