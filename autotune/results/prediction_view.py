"""Read the JSON of a prediction, from here or from a service, as values for those who show it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.schema import decode
from autotune.core.workload import Workload
from autotune.results.predicted import BatchDocument, TimedBatchDocument

T = TypeVar("T")


@dataclass(frozen=True)
class BatchView:
    """What is predicted of a candidate."""

    candidate: Candidate
    memory: BatchDocument
    speed: TimedBatchDocument | None
    """``None`` where no speed is predicted."""

    @property
    def samples_per_second(self) -> float:
        """The predicted speed; 0 where none is predicted."""
        return self.speed.samples_per_second if self.speed is not None else 0.0

    def name(self) -> str:
        """Return ``bf16, checkpointing at 32 × 2``."""
        candidate = self.candidate
        batch = f"{candidate.per_device_train_batch_size} × {candidate.gradient_accumulation_steps}"
        return f"{candidate.arm.describe()} at {batch}"


@dataclass(frozen=True)
class ArmView:
    """What is predicted of a configuration."""

    arm: Arm
    largest_batch: int | None
    batches: tuple[BatchView, ...]
    why_not: str | None = None
    """Why nothing is predicted, where that is known."""

    @property
    def fitting(self) -> list[BatchView]:
        """The batches that fit."""
        return [batch for batch in self.batches if batch.memory.fits]

    @property
    def fastest(self) -> BatchView | None:
        """The fastest batch that fits, or the largest where speed is not predicted; ``None`` where none fits."""
        return max(
            self.fitting,
            key=lambda batch: (batch.samples_per_second, batch.candidate.per_device_train_batch_size),
            default=None,
        )


@dataclass(frozen=True)
class GpuView:
    """What is predicted for one kind of GPU."""

    gpu: str
    workload: Workload
    """Without its config."""
    ceiling_bytes: int
    line_bytes: int
    fits_below_bytes: int
    arms: tuple[ArmView, ...]
    unquantized_bytes: int = 0

    @property
    def ranks(self) -> int:
        """How many GPUs train together."""
        return self.arms[0].arm.ranks

    @property
    def best(self) -> BatchView | None:
        """The fastest that fits; ``None`` where no speed is predicted or none fits."""
        timed = [batch for arm in self.arms for batch in arm.fitting if batch.speed is not None]
        return max(timed, key=lambda batch: batch.samples_per_second, default=None)


def gpu_view(document: Document) -> GpuView:
    """Return the view of one of the ``gpus`` of a prediction; raises ``ValueError`` where it is malformed."""
    arms = []
    for of_arm in document["arms"]:
        arm, batches = _known(of_arm, Arm), []
        for batch in of_arm["batches"]:
            timed = _known(batch, TimedBatchDocument) if "samples_per_second" in batch else None
            memory: BatchDocument = timed or _known(batch, BatchDocument)
            candidate = Candidate(arm, memory.per_device_train_batch_size, memory.gradient_accumulation_steps)
            batches.append(BatchView(candidate, memory, timed))
        arms.append(ArmView(arm, of_arm.get("largest_batch"), tuple(batches), of_arm.get("why_not")))
    return GpuView(
        document["gpu"],
        _known({**document["workload"], "config": {}}, Workload),
        document["ceiling_bytes"],
        document["line_bytes"],
        document["fits_below_bytes"],
        tuple(arms),
        # A service may be of an earlier version.
        document.get("unquantized_bytes", 0),
    )


def _known(document: Document, kind: type[T]) -> T:
    """Return a value of the fields that are known here: a service may be of a later version."""
    fields: Any = kind
    names = {field.name for field in dataclasses.fields(fields)}
    return decode({name: value for name, value in document.items() if name in names}, kind)
