"""Describe the trainings after a search, as their processes need them: to verify its result, or for real.

Both are sent as JSON documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autotune.core.candidate import Candidate
from autotune.core.placement import RankDevices
from autotune.core.training_source import TrainingSource
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


VARIABLE = "AUTOTUNE_TRAINS"
"""Set for the processes of such a training, to the document of ``RealTraining``."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a study promises of a training with its winner."""

    samples_per_second: float
    low: float
    """Lower end of the 95 % interval of a run's samples a second."""
    high: float
    line_bytes: int
    """Bytes below which the device's reserved memory should stay."""
    tokens_per_sample: float | None = None
    utilization: float | None = None
    """Share of the GPU's rated arithmetic at that speed; ``None`` where it is not known."""
    runs_file: str | None = None
    """Gets a line for each run, see ``WatchedRun``."""
    warm_steps: int = 10
    """Optimizer steps at the start of a run that are not compared with the promise."""


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The speed of a training with a winner, and whether the promise was kept."""

    ended_at: str
    steps: int
    """Timed optimizer steps."""
    samples_per_second: float
    promised_low: float
    kept: bool
    """Whether it was at least as fast as the promised interval."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a training that runs out of memory is started again."""

    file: str
    """Gets a word where memory ran out."""
    since: float
    """When the first attempt began, in seconds of the epoch: older checkpoints are of other trainings."""
    attempt: int = 0
    """From 1 on, the training goes on from its last checkpoint."""


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
    recovery: Recovery | None = None
    """``None`` where running out of memory ends it."""
    loader_batches: dict[str, int] = field(default_factory=dict)
    """The batches of a loop's validation, by where its ``DataLoader`` is made: where its own do not fit."""

    def with_smaller_batch(self) -> RealTraining | None:
        """Return the training with the next smaller batch, at most half, at the same effective batch, or ``None``."""
        batch, accumulation = self.candidate.per_device_train_batch_size, self.candidate.gradient_accumulation_steps
        samples = batch * accumulation
        smaller = next((size for size in range(batch // 2, 0, -1) if samples % size == 0), None)
        if smaller is None:
            return None
        pair = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": samples // smaller}
        candidate = Candidate(self.candidate.arm, smaller, samples // smaller)
        return replace(self, candidate=candidate, arguments={**self.arguments, **pair})
