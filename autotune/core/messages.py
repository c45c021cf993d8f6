"""Describe what the process of a job tells the controller: its progress, and in the end its answer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from autotune.core.dataset_spec import DataFacts
from autotune.core.schema import decode


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


# What a trial does in each of its phases. The phases themselves are keys of JSON documents.
_DOING = {
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

    def describe(self) -> str:
        """Say in a few words what the job does: ``building the model`` or ``step 7``."""
        if self.phase is None:
            return f"step {'?' if self.step is None else self.step}"
        return _DOING.get(self.phase, self.phase)


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

    def after(self, message: dict[str, Any]) -> Answer:
        """Return the answer with what a message of the trial server adds; a line that is no message is noted."""
        fields = {name: value for name, value in message.items() if name not in ("id", "ended", "progress")}
        try:
            return decode({**dataclasses.asdict(self), **fields}, Answer)
        except ValueError:
            return dataclasses.replace(self, malformed=str(message)[:200])
