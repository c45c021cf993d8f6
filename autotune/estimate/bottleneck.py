"""What limits a step: the GPU, the host that gives it its work, or the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.core.candidate import Candidate
from autotune.core.outcome import Measurement
from autotune.space.dataloader import LOADER_BOUND, waits_for_data

LimitKind = Literal["gpu", "host", "data", "unknown"]

HOST_BOUND = 0.9
"""A GPU that computes for a smaller share of a step than this waits for something.

Nine steps on an H200 whose host has slow cores had 0.92 (bert-large, bf16, 32 × 2), 0.89 (tf32, 8 × 8) and, with less
work in each kernel, 0.84 down to 0.18."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What a step spends its time on. The shares that are known and what is left of them add up to 1."""

    kind: LimitKind
    gpu_busy_share: float | None
    """While the GPU executes something; ``None`` where that was not measured."""
    data_share: float
    """Before the step's batches are there."""
    factor: float | None
    """How many times as fast a step would be that only had to wait for the GPU; ``None`` where that is not known."""

    @property
    def host_share(self) -> float | None:
        """While the GPU waits for the host, with the batches there; ``None`` where that was not measured."""
        return None if self.gpu_busy_share is None else max(0.0, 1 - self.gpu_busy_share - self.data_share)


def what_limits(measured: Measurement) -> Limit:
    """The part of a step that is worth making shorter, from the measured shares."""
    busy, data = measured.gpu_busy_share, waits_for_data(measured)
    if busy is None:
        return Limit("data" if data > LOADER_BOUND else "unknown", None, data, None)
    kind: LimitKind = "gpu"
    if busy < HOST_BOUND:
        # What waits for data is not the host's to win back, and the other way round: the longer wait counts.
        kind = "data" if data > (1 - busy) / 2 else "host"
    return Limit(kind, busy, data, 1 / busy)


def describe_limit(candidate: Candidate, measured: Measurement) -> str | None:
    """The same in one line, with what would help; ``None`` where nothing was measured."""
    limit = what_limits(measured)
    if limit.gpu_busy_share is None or limit.factor is None:
        return None
    computes = f"the GPU computes {limit.gpu_busy_share * 100:.0f} % of a step"
    if limit.kind == "gpu":
        return computes
    by = f"would help, by up to {limit.factor:.1f} ×"
    if limit.kind == "data":
        return f"{computes}; the rest waits for data: faster loading {by}"
    return f"{computes}; the rest waits for the host: {_remedies(candidate)} {by}"


def _remedies(candidate: Candidate) -> str:
    """What makes the host quicker, of that which the candidate does not have yet."""
    remedies = ["fewer and larger micro-steps" if candidate.accumulates else "larger batches"]
    if not candidate.arm.torch_compile:
        remedies.append("torch.compile")
    if not candidate.arm.cpu_affinity:
        remedies.append("one core for all threads")
    remedies.append("a faster core")
    return ", ".join(remedies[:-1]) + f" or {remedies[-1]}"
