"""Expect what a lever gains, from what a trial measured of its step: where the time goes, and for which work.

The expectation is the most that the lever may give: a step takes as long as the slowest of the GPU and the host, each
of which a lever shortens by a known factor. What it gives is measured; the ratio of the two corrects the next
expectation of the same lever.
"""

from __future__ import annotations

from autotune.core.outcome import Measurement
from autotune.estimate.bottleneck import HOST_BOUND, what_limits
from autotune.space.levers import Prior

# Kinds of work that one kernel can do in passing, which a compiler fuses: they are limited by memory traffic.
_IN_PASSING = frozenset(
    ("elementwise", "normalisation", "normalisation_backward", "softmax", "dropout", "reduction", "cast", "copy",
     "fill", "transpose")
)  # fmt: skip
# Where they were not measured: of nine models on an H200 they took 0.2 to 0.5 of the GPU's time.
_USUAL_SHARE_IN_PASSING = 0.3
# Where it was not measured: that of a step which the GPU limits. A choice.
_USUAL_BUSY_SHARE = 0.92
# Share of a step for which a GPU-bound host is busy; it is not measured there. A choice.
_BUSY_HOST = 0.7


def share_in_passing(measured: Measurement) -> float:
    """Return the share of the GPU's time that goes into work which a compiler can fuse."""
    kinds = dict(measured.gpu_seconds_by_kind or ())
    total = sum(kinds.values())
    if not total:
        return _USUAL_SHARE_IN_PASSING
    return sum(seconds for kind, seconds in kinds.items() if kind in _IN_PASSING) / total


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
