"""Tell whether a step is GPU-bound, host-bound or data-bound, and expect what a lever gains from that.

The expectation is the most that the lever may give: a step takes as long as the slowest of the GPU and the host, each
of which a lever shortens by a known factor. What it gives is measured; the ratio of the two corrects the next
expectation of the same lever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.core.candidate import Candidate
from autotune.core.outcome import HOST_BOUND as HOST_BOUND
from autotune.core.outcome import Measurement
from autotune.space.dataloader import waits_for_data
from autotune.space.levers import Prior

LimitKind = Literal["gpu", "host", "data", "unknown"]

DATA_BOUND = 0.5
"""Where the GPU's share was not measured, a step that waits for data for more than this share is data-bound: most of
it."""


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
        """Share in which the GPU waits for the host although the batches are there; ``None`` where not measured."""
        return None if self.gpu_busy_share is None else max(0.0, 1 - self.gpu_busy_share - self.data_share)


def what_limits(measured: Measurement) -> Limit:
    """Return what limits a step, from the measured shares."""
    busy, data = measured.gpu_busy_share, waits_for_data(measured)
    if busy is None:
        return Limit("data" if data > DATA_BOUND else "unknown", None, data, None)
    kind: LimitKind = "gpu"
    if busy < HOST_BOUND:
        # The longer of the two waits names the limit: shortening the other would gain less.
        kind = "data" if data > (1 - busy) / 2 else "host"
    return Limit(kind, busy, data, 1 / busy)


def describe_limit(candidate: Candidate, measured: Measurement) -> str | None:
    """Describe the limit in one line, with what would help; return ``None`` where nothing was measured."""
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
    """Return what would reduce the host's time, of the options that the candidate does not use yet."""
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
# Where they were not measured: of nine models on an H200 they took 0.2 to 0.5 of the GPU's time.
USUAL_SHARE_IN_PASSING = 0.3
# Where it was not measured: that of a step which the GPU limits. A choice.
_USUAL_BUSY_SHARE = 0.92
# Share of a step for which a GPU-bound host is busy; it is not measured there. A choice.
_BUSY_HOST = 0.7


def share_in_passing(measured: Measurement) -> float | None:
    """Return the share of the GPU's time that goes into work which a compiler can fuse; ``None``: not measured."""
    kinds = dict(measured.gpu_seconds_by_kind or ())
    total = sum(kinds.values())
    return sum(seconds for kind, seconds in kinds.items() if kind in _IN_PASSING) / total if total else None


def gain_of(prior: Prior, measured: Measurement, *, graphed: bool = False) -> float:
    """Return by which factor a step may become faster at most.

    A step is as long as its data takes and then the GPU or the host, whichever takes longer. Where the GPU limits it,
    the gaps between its kernels are the host's. In a step that is ``graphed`` the host waits for the GPU: what is left
    of the host's time, and the gaps, come on top of the GPU's.
    """
    limit = what_limits(measured)
    busy, data = limit.gpu_busy_share, limit.data_share
    if busy is None:
        busy = _USUAL_BUSY_SHARE * (1 - data)
    passing = share_in_passing(measured)
    passing = USUAL_SHARE_IN_PASSING if passing is None else passing
    gpu = busy * (passing * prior.passing + (1 - passing) * prior.computing)
    idle = max(0.0, 1 - busy - data)
    if graphed:
        return 1 / (data + gpu + prior.host * idle)
    if busy < HOST_BOUND * (1 - data):
        return 1 / (data + max(gpu, prior.host * (1 - data)))
    return 1 / (data + max(gpu + prior.host * idle, prior.host * _BUSY_HOST))


def gain_of_fewer_layers(measured: Measurement, layers: int, of: int, before: int) -> float:
    """Return the gain of recomputing so many layers in place of ``before``, out of all of them.

    Recomputing is one pass of three, of four where all weights are trained.
    """
    forward, both = measured.sample_flops or (1.0, 3.0)
    share = forward / (forward + both)
    return (1 - share * (1 - before / of)) / (1 - share * (1 - layers / of))
