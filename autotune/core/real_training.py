"""Describe trainings after a search, for their processes: the stock run that verifies its result, and the real one.

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
    """Train a workload with an unchanged transformers ``Trainer`` and exported arguments, to verify a result."""

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
    """Consecutive steps of a stock run that were timed together."""

    steps: int
    samples: int
    seconds: float
    new_shapes: int
    """Batches whose shape no earlier batch had."""


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """The most memory that torch's allocator had allocated and reserved up to a point of the run."""

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
"""Environment variable of the processes of a real training, with the JSON document of its ``RealTraining``."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The speed and memory that a study promises for a training with its winner."""

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
    """The file to which each watched run adds a line, a ``WatchedRun``; ``None`` for no file."""
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
    """The file that the training writes where it runs out of memory."""
    since: float
    """When the first attempt began, in seconds of the epoch: older checkpoints are of other trainings."""
    attempt: int = 0
    """Number of restarts so far. After a restart, the training goes on from its last checkpoint."""


@dataclass(frozen=True, slots=True)
class RealTraining:
    """A training of the user's own code with a candidate's settings, as ``autotune run`` starts it."""

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
    """The CPU core that it is pinned to; the processes that load its data are not. ``None``: not pinned."""
    promise: Promise | None = None
    """What the run's speed is compared with; ``None`` where it is not watched."""
    recovery: Recovery | None = None
    """``None`` where running out of memory ends the training."""
    loader_batches: dict[str, int] = field(default_factory=dict)
    """Batch sizes that fit, for validation loaders whose own do not, by the line that makes the ``DataLoader``."""

    def with_smaller_batch(self) -> RealTraining | None:
        """Return the training with at most half the batch at the same effective batch; ``None`` for a batch of 1."""
        batch, accumulation = self.candidate.per_device_train_batch_size, self.candidate.gradient_accumulation_steps
        samples = batch * accumulation
        smaller = next((size for size in range(batch // 2, 0, -1) if samples % size == 0), None)
        if smaller is None:
            return None
        pair = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": samples // smaller}
        candidate = Candidate(self.candidate.arm, smaller, samples // smaller)
        return replace(self, candidate=candidate, arguments={**self.arguments, **pair})
