"""Tell whether a step is GPU-bound, host-bound or data-bound, and what the GPU's time of it is spent on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.core.candidate import Candidate
from autotune.core.outcome import HOST_BOUND as HOST_BOUND
from autotune.core.outcome import Measurement
from autotune.space.space import waits_for_data

LimitKind = Literal["gpu", "host", "data", "unknown"]

DATA_BOUND = 0.5
"""Where the GPU's share was not measured, a step is data-bound that waits for data for more than this share of it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What the time of a step is spent on. The known shares and the host's share add up to 1."""

    kind: LimitKind
    gpu_busy_share: float | None
    """Share in which the GPU executes something; ``None`` where it was not measured."""
    data_share: float
    """Share in which the step waits for its batches."""
    factor: float | None
    """Speed-up of a step that never had to wait for host or data; ``None`` where it is not known."""

    @property
    def host_share(self) -> float | None:
        """Share of a step in which the GPU waits for the host, not for data; ``None`` where not measured."""
        return None if self.gpu_busy_share is None else max(0.0, 1 - self.gpu_busy_share - self.data_share)


def what_limits(measured: Measurement) -> Limit:
    """Return what limits a step (GPU, host or data), from the measured shares."""
    busy, data = measured.gpu_busy_share, waits_for_data(measured)
    if busy is None:
        return Limit("data" if data > DATA_BOUND else "unknown", None, data, None)
    kind: LimitKind = "gpu"
    if busy < HOST_BOUND:
        # The longer of the two waits names the limit: shortening the other would gain less.
        kind = "data" if data > (1 - busy) / 2 else "host"
    return Limit(kind, busy, data, 1 / busy)


def describe_limit(candidate: Candidate, measured: Measurement) -> str | None:
    """Describe the limit of a step in one line, with advice; return ``None`` without measured shares."""
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
    """Return advice on reducing the host's time, by options that the candidate does not use yet."""
    remedies = ["fewer and larger micro-steps" if candidate.accumulates else "larger batches"]
    if not candidate.arm.torch_compile:
        remedies.append("torch.compile")
    if not candidate.arm.cpu_affinity:
        remedies.append("one core for all threads")
    remedies.append("a faster core")
    return ", ".join(remedies[:-1]) + f" or {remedies[-1]}"


# Kinds of work that one kernel can do in passing, which a compiler fuses: they are limited by memory traffic.
_IN_PASSING = frozenset(
    ("elementwise", "normalisation", "normalisation_backward", "softmax", "dropout", "reduction", "cast", "copy",
     "fill", "transpose")
)  # fmt: skip
# Their share of the GPU's time, where it was not measured: 0.2 to 0.5 for nine models on an H200.
USUAL_SHARE_IN_PASSING = 0.3


def share_in_passing(measured: Measurement) -> float | None:
    """Return the share of GPU time in kernels that a compiler can fuse; ``None`` where not measured."""
    kinds = dict(measured.gpu_seconds_by_kind or ())
    total = sum(kinds.values())
    return sum(seconds for kind, seconds in kinds.items() if kind in _IN_PASSING) / total if total else None
