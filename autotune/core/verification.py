"""Describe what a fresh process trains to verify a result, and what it measures.

Both are sent as JSON documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.core.placement import RankDevices
from autotune.core.workload import Workload

RunState = Literal["completed", "out_of_memory", "failed"]


@dataclass(frozen=True, slots=True)
class StockWork:
    """Train a workload with a stock ``Trainer`` and exported arguments."""

    workload: Workload
    devices: RankDevices
    arguments: dict[str, Any]
    """Fields of ``TrainingArguments``."""
    attn_implementation: str
    seed: int
    steps: int
    evaluates: bool = False
    """Whether there is one evaluation and one checkpoint between the steps."""
    cap_bytes: int | None = None
    """What the allocator may reserve; ``None`` means all that the device has."""
    pinned: bool = False
    """Whether the process runs on one core."""
    cpu_core: int | None = None
    """The core that the winner was measured on; ``None`` where that is not known."""
    data_folder: str | None = None
    """The folder of the prepared dataset; ``None`` without one."""
    applied: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``autotune.training.apply``."""
    context_parallel: int = 1
    """Ranks that share each sample."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some consecutive steps that were timed together."""

    steps: int
    samples: int
    seconds: float
    new_shapes: int
    """Batches with shapes that none before had."""


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """The most memory that was allocated and reserved up to some point."""

    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class StockResult:
    """What a stock run measured, or how it failed."""

    state: RunState
    message: str | None = None
    during: str | None = None
    """The part in which it failed: ``train``, ``evaluate`` or ``save``."""
    packages: dict[str, str | None] = field(default_factory=dict)
    """Versions of the libraries; ``None`` for one that is not installed."""
    cpu_core: int | None = None
    stretches: tuple[Stretch, ...] = ()
    peak_bytes: dict[str, PeakBytes] = field(default_factory=dict)
    """The peak ``before`` the evaluation, by the end of ``evaluate`` and ``save``, and at the ``end``."""
    pause_seconds: dict[str, float] = field(default_factory=dict)
    """How long ``evaluate`` and ``save`` took."""
    unsaved_bytes: int | None = None
    """Size of the checkpoint, where it was too large to be written."""
    joules_per_sample: float | None = None
    skipped_steps: int | None = None
    loss_problem: str | None = None
    """What was wrong with the loss, such as that it was not finite."""
    evaluation_batch_size: int | None = None
