"""Find out whether the loss of a batch is the mean over its samples, from the losses of its halves or its gradients.

A sum over the samples, or a loss that compares them with each other, is another training with another per-device batch,
even where accumulation makes the same effective batch of it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


# By its gradients. Where it is not, n batches of one sample train otherwise than one batch of n.


# Of the largest second derivative within a sample: those across samples are no rounding. A choice.
_LEAST_SHARE = 1e-4
# Between a loss and the sum or mean in it are divisions, changes of the sign, the dtype and the shape.
_MOST_NODES = 16
_PASSED = ("Div", "Mul", "Neg", "ToCopy", "Squeeze", "View", "Add", "Sub")
# reduction="sum", as the functions of torch.nn.functional save it for their backward pass.
_SUM = 2


@dataclass(frozen=True, slots=True)
class LossOfSamples:
    """What the gradients of one backward pass showed."""

    compares: bool = False
    """Whether the gradient of one sample depends on others."""
    is_summed: bool = False
    """Whether the loss is a sum, as its graph says; it may have been divided since."""
    gradient: float = 0.0
    """The mean norm of a sample's gradient, at the output of the model."""


def loss_of_samples(tensors: Any, outputs: Sequence[torch.Tensor]) -> LossOfSamples | None:
    """Look at the loss that a backward pass is about to begin from, and at what models returned for it.

    The first dimension of the ``outputs`` is that of samples, or of their rows. Returns ``None`` where that cannot be
    known: without an output that the loss depends on, or with functions that have no second derivative. Hooks on the
    tensors between both are called for it, too.
    """
    loss = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        return None
    for output in reversed(outputs):
        try:
            dependence = _look(loss, output)
        except Exception:
            # Of a function or a hook of the user's; the training itself goes on.
            return None
        if dependence is not None:
            return dependence
    return None


def _look(loss: torch.Tensor, output: torch.Tensor) -> LossOfSamples | None:
    (first,) = torch.autograd.grad(loss.sum(), output, create_graph=True, allow_unused=True)
    if first is None:
        return None
    gradient = float(first.detach().float().reshape(len(first), -1).norm(dim=1).mean())
    return LossOfSamples(_compares(first, output), _is_summed(loss.grad_fn), gradient)


def _compares(first: torch.Tensor, output: torch.Tensor) -> bool:
    if not first.requires_grad:
        return False
    half = len(output) // 2
    # Any direction will do that no symmetry makes vanish.
    direction = torch.cos(torch.arange(first[:half].numel(), device=first.device)).view_as(first[:half])
    (second,) = torch.autograd.grad((first[:half] * direction).sum(), output, retain_graph=True, allow_unused=True)
    if second is None:
        return False
    within, across = (float(part.detach().abs().max()) for part in (second[:half], second[half:]))
    return across > _LEAST_SHARE * within


def _is_summed(node: Any) -> bool:
    for _ in range(_MOST_NODES):
        if node is None:
            return False
        reduction = getattr(node, "_saved_reduction", None)
        if reduction is not None:
            return bool(reduction == _SUM)
        name = type(node).__name__
        if name.startswith("Sum"):
            return True
        if not name.startswith(_PASSED) or not node.next_functions:
            return False
        node = node.next_functions[0][0]
    return False
