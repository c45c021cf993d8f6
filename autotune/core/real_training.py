"""Describe a real training with the winner of a study, as the process needs it that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.training_source import TrainingSource

VARIABLE = "AUTOTUNE_TRAINS"
"""Set for the processes of such a training, to the document of ``RealTraining``."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a study promises of a training with its winner."""

    samples_per_second: float
    low: float
    """Of the 95 % interval of a run's samples a second."""
    high: float
    line_bytes: int
    """What the device's reserved memory should stay below."""
    tokens_per_sample: float | None = None
    utilization: float | None = None
    """Share of the GPU's rated arithmetic at that speed; ``None`` where it is not known."""
    runs_file: str | None = None
    """Gets a line for each run, see ``WatchedRun``."""


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """What was seen of a training with a winner."""

    ended_at: str
    steps: int
    """Those that were timed."""
    samples_per_second: float
    promised_low: float
    kept: bool
    """Whether it was at least as fast as the promised interval."""


@dataclass(frozen=True, slots=True)
class RealTraining:
    """What to train, and with which settings."""

    study: str
    source: TrainingSource
    candidate: Candidate
    arguments: dict[str, Any]
    """The fields of ``TrainingArguments``, or the settings of other code under its own names."""
    dtype: str | None = None
    """Of most of the model's weights, as they were measured; ``None`` where that is not known."""
    has_adapters: bool | None = None
    """Whether peft's adapters were around a model by name; ``None`` for the user's own code."""
    folder: str | None = None
    """A temporary folder that is removed at the end."""
    cpu_core: int | None = None
    """The core that it is pinned to, but for the processes that load its data."""
    promise: Promise | None = None
    """What a run is watched for; ``None`` where it is not watched."""
