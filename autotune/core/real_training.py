"""Describe a real training with the winner of a study, as the process needs it that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.training_source import TrainingSource

VARIABLE = "AUTOTUNE_TRAINS"
"""Set for the processes of such a training, to the document of ``RealTraining``."""


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
