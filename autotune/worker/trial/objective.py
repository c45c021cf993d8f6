"""Find out whether the loss of a batch is the mean over its samples, from the losses of its halves.

A sum over the samples, or a loss that compares them with each other, is another training with another per-device batch,
even where accumulation makes the same effective batch of it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autotune.core.outcome import LossOfBatch

# The mean of two halves may differ from that of the whole by rounding, and by small terms for the load of experts.
_TOLERANCE = 0.02


class _NotDivisibleError(Exception):
    """A batch cannot be taken apart in the middle."""


def without_tensors(batch: Any) -> Callable[[], Any]:
    """Return what gives a batch again while somebody else keeps its tensors; raises ``ReferenceError`` after that."""
    if isinstance(batch, torch.Tensor):
        kept = weakref.ref(batch)

        def tensor() -> torch.Tensor:
            loss = kept()
            if loss is None:
                raise ReferenceError("the batch is gone")
            return loss

        return tensor
    if hasattr(batch, "items"):
        named = {name: without_tensors(value) for name, value in batch.items()}
        return lambda: {name: give() for name, give in named.items()}
    if isinstance(batch, list | tuple):
        each = [without_tensors(value) for value in batch]
        return lambda: [give() for give in each]
    return lambda: batch


def half(batch: Any, samples: int, *, first: bool) -> Any:
    """Return a half of a batch of so many samples; raises ``_NotDivisibleError`` where it has none."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0 or len(batch) < samples:
            return batch
        # Several rows a sample, as of pairs, may lie one after the other, or all the first before all the second ones.
        if len(batch) % 2 or len(batch) > samples:
            raise _NotDivisibleError
        middle = len(batch) // 2
        return batch[:middle] if first else batch[middle:]
    if isinstance(batch, Mapping):
        return {name: half(value, samples, first=first) for name, value in batch.items()}
    if isinstance(batch, list):
        return [half(value, samples, first=first) for value in batch]
    return batch


@torch.no_grad()
def loss_of_batch(compute: Callable[[Any], Any], give: Callable[[], Any], samples: int) -> LossOfBatch | None:
    """Return whether the loss of a batch lies between those of its halves; ``None`` where that cannot be told.

    ``give`` gives the batch; ``compute`` returns the loss of one, and may change it.
    """
    try:
        batch = give()
        halves = [half(batch, samples, first=first) for first in (True, False)]
        whole, again, *parts = (float(compute(half(each, 1 << 62, first=True))) for each in (batch, batch, *halves))
    except Exception:
        # Whatever their loss does not take; the measurement is complete without it.
        return None
    if not all(map(math.isfinite, (whole, again, *parts))):
        return None
    # Of losses with random parts, such as the noise of diffusion, the differences say how much those make.
    slack = _TOLERANCE * max(map(abs, parts)) + 3 * abs(whole - again) + 1e-6
    return "mean" if min(parts) - slack <= whole <= max(parts) + slack else "other"
