"""Describe a prediction for an arm (a configuration without its batch): its question, peaks of memory, and operations.

A process with torch predicts by a step on fake tensors. Its answers are sent and stored as JSON documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autotune.core.candidate import Arm
from autotune.core.device import Chip, Precision

_HALF = ("float16", "bfloat16")

Size = tuple[int, int]
"""An amount that is linear in the batch: the amount for each sample, and a constant amount."""


@dataclass(frozen=True, slots=True)
class PredictionWork:
    """What to predict: the peaks of an arm at some batches, and the largest batch that fits."""

    arm: Arm
    chip: Chip
    """The GPU, reduced to what decides how much memory a step takes; see ``Chip.decisive``."""
    cap_bytes: int
    """The most that torch's allocator may reserve."""
    line_bytes: int
    """The most that a step may reserve to fit: the cap less the headroom."""
    batches: tuple[tuple[int, int], ...]
    """Pairs of per-device batch and accumulation."""
    multiple: int | None
    """Also find the largest batch that fits without accumulation, among multiples of this; ``None`` leaves it out."""
    step: str | None = None
    """For the user's own code: the trace of a step, packed as text; see ``TracedStep``."""


@dataclass(frozen=True, slots=True)
class ArmsToTrace:
    """The arms of the user's own code whose steps an inspection traces, as they would run on a GPU ``chip``."""

    precisions: tuple[Precision, ...]
    checkpointing: tuple[bool, ...]
    optims: tuple[str, ...]
    """Empty for the optimizer of the code itself."""
    chip: Chip | None = None
    """``None`` until the GPU has been read."""
    within_seconds: float = 120.0
    """How long the whole inspection may take, traces included."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The trace of a step of the user's own code in one arm, from which its memory at any batch follows."""

    arm: Arm
    step: str
    """The trace, packed as text by ``autotune.worker.fake.memory``."""


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """The predicted peaks of one arm at one per-device batch and accumulation."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    micro_batch_bytes: int
    """Bytes that the inputs of one micro-step take. The Trainer moves those of all micro-steps to the device at
    once."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Peak of a simulated caching allocator. Under the cap, cached segments are freed before it is exceeded."""
    runs_out: bool
    """Whether the cap is exceeded even after cached segments are freed."""
    fits: bool
    """Whether the peak is within cap and line, with the memory that DDP may take besides; see ``spare_bytes``."""
    anatomy: dict[str, int]
    """Bytes of the peak by kind: weights, gradients, optimizer, activations, inputs, workspaces.

    Logits and the loss are counted as activations."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Operations of a step that are equal in all these fields, counted together."""

    part: str
    """``forward``, ``backward``, ``recomputation`` or ``update``."""
    kind: str
    dtype: str
    flops: Size
    bytes: Size
    shape: tuple[Size, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of one micro-step and of the optimizer's update, for arms of one memory class."""

    rows: tuple[Operation, ...]
    dispatched: dict[str, int]
    """Number of operations that the host issues in each part, including views."""
    gradient_tensors: int
    gradient_bytes: int
    unknown: dict[str, int] = field(default_factory=dict)
    """By name, how often operations of an unknown class run. Of these, ``rows`` count only the memory traffic."""

    def product_flops(self, batch: int) -> float:
        """Return the floating-point operations of matrix products, attention and convolutions in one micro-step.

        Recomputed operations are left out, as usual for the utilization of a GPU (MFU; Chowdhery et al. 2022, appendix
        B).
        """
        return sum(flops for _, flops in self._products(batch))

    def is_in_half(self, batch: int) -> bool:
        """Return whether most of ``product_flops`` are in 16 bits, by autocast or by the dtype of the weights."""
        half = sum(flops for dtype, flops in self._products(batch) if dtype in _HALF)
        return half > self.product_flops(batch) / 2

    def _products(self, batch: int) -> Iterator[tuple[str, float]]:
        """Yield dtype and floating-point operations of each row of the forward and the backward pass."""
        kept = (row for row in self.rows if row.part in ("forward", "backward"))
        return ((row.dtype, float(row.count * amount_at(row.flops, batch))) for row in kept)


def spare_bytes(arm: Arm, operations: Operations | None) -> int:
    """Return the memory needed beyond the predicted peak: under DDP a second copy of the gradients, else 0.

    DDP makes new gradient buckets in the second step, and NCCL may still hold the old ones there
    (docs/results/several-gpus.md).
    """
    return operations.gradient_bytes if operations and arm.strategy == "ddp" and arm.ranks > 1 else 0


def amount_at(size: Size, batch: int) -> int:
    """Return an amount that is linear in the batch, at this batch size."""
    return size[0] * batch + size[1]


@dataclass(frozen=True, slots=True)
class PredictionAnswer:
    """The answer to a ``PredictionWork``: peaks of an arm at its batches, and the operations of its step."""

    batches: tuple[MemoryPrediction, ...]
    """By ascending batch: those asked for and, with ``multiple``, the largest that fits and the next larger one."""
    largest_batch: int | None
    """0 where none fits; ``None`` where it was not asked for."""
    operations: Operations | None = None
    """What a step consists of; ``None`` in recordings from before operations were counted."""
