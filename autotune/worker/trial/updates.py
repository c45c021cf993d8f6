"""Look at what an optimizer's step had to do, and did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune.worker.private.torch import local_part

# Elements of each parameter that are compared before and after an update. A choice.
_COMPARED_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimizer's step had to do, and did."""

    has_gradients: bool
    """Whether any of its parameters has one, on a device that computes."""
    is_finite: bool
    is_zero: bool
    """Whether all gradients are zero."""
    is_lost: bool
    """Whether float32 weights with gradients stayed as they were, though the learning rate is not zero."""

    @property
    def is_honest(self) -> bool:
        """Whether it trained."""
        return self.has_gradients and self.is_finite and not self.is_zero and not self.is_lost


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from (each for each in group["params"] if isinstance(each, torch.Tensor))


@torch.no_grad()
def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first elements of a tensor, all of a sparse one's values."""
    tensor = local_part(tensor.detach())
    if tensor.layout is not torch.strided:
        return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    return tensor.reshape(-1)[:_COMPARED_ELEMENTS] if tensor.is_contiguous() else tensor[:1].reshape(-1)


@torch.no_grad()
def update_of(optimizer: Any, before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Update:
    """Return what a step did to the parameters, given their first elements before it."""
    gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None and not each.is_meta]
    if not gradients:
        return Update(has_gradients=False, is_finite=True, is_zero=True, is_lost=False)
    is_finite = all(bool(torch.isfinite(part_of(each)).all()) for each in gradients)
    is_zero = not any(bool(part_of(each).any()) for each in gradients)
    if is_zero:
        # The first rows of an embedding may have none.
        is_zero = not any(bool(local_part(each.detach()).abs().sum() != 0) for each in gradients)
    is_lost = any(float(group.get("lr", 1)) != 0 for group in optimizer.param_groups)
    is_compared = False
    for parameter, weights in before:
        if not is_lost:
            break
        gradient = parameter.grad
        # Of fewer bits, small updates are lost in rounding.
        if gradient is None or gradient.layout is not torch.strided or parameter.dtype is not torch.float32:
            continue
        moves = part_of(gradient) != 0
        if bool(moves.any()):
            is_compared = True
            is_lost = torch.equal(part_of(parameter)[moves], weights[moves])
    return Update(True, is_finite, is_zero, is_lost and is_compared)
