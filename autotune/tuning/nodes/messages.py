"""Define the messages between a search and a node of a cluster, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.core.device import Device
from autotune.core.messages import Progress


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts about a node, which it sends first."""

    host: str
    version: str
    """Of autotune."""
    code: str
    """A digest of autotune's modules."""
    devices: tuple[Device, ...]
    """What the node's process may use: the GPUs that it was given, then the CPU."""
    packages: dict[str, str | None]
    """The versions of Python and of what a training runs on; ``None`` for one that is not installed."""
    gpu_problem: str | None = None
    """Why a GPU may be missing."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A search that a node is to run trials of."""

    study: str
    workload: dict[str, Any]
    slots: tuple[tuple[str, ...], ...]
    """The UUIDs of the devices of each place where trials run, one for each rank."""
    cwd: str
    """The folder in which the search was started; code of the user's own may depend on it."""
    wait: bool
    """Whether to wait while another search holds a device."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a node says once it is ready for a search."""

    folder: str
    """Its folder of logs, which messages may name."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a trial under way on a node said, or how it ended."""

    trial_id: str
    progress: Progress | None = None
    outcome: dict[str, Any] | None = None
    """``None`` while it runs."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error that the user can act on."""

    exit_code: int
    """Tells which kind of error it is."""
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What a node answers to a question."""

    answer: Any = None
    problem: Problem | None = None
    notes: tuple[str, ...] = ()
    """For the user."""
    logs: dict[str, str] | None = None
    """The logs that have changed since the last reply that had some, by their names."""
