"""Find out by the gradients of a loss whether it is the mean over the samples of a batch.

A sum over the samples, or a loss that compares them with each other, is another training with another per-device batch,
even where accumulation makes the same effective batch of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
