"""Count the arithmetic of a training step: its matrix products, convolutions and attention, as torch computes them.

What is looked at is one forward pass. In the backward pass each product is computed once more for each of its two
inputs that has a gradient. Nothing that is computed again, for checkpointing or within attention, counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is computed while it is entered: forward passes, with what their backward passes will compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward_flops = 0
        self.flops = 0
        """Of the forward and the backward pass."""
        self.tokens: int | None = None
        """Padding included; ``None`` where the model takes no ``input_ids``."""

    def __torch_dispatch__(self, function: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        """Run and count an operation."""
        named = named or {}
        result = function(*given, **named)
        if (flops := _flops_of(function, given, named, result)) is not None:
            self.forward_flops += flops
            self.flops += flops * (1 + _gradients(function, given))
        return result

    def count_first(self, trainer: Any) -> None:
        """Count the first micro-step of a ``Trainer``, during warm-up."""
        compute_loss: Callable[..., Any] = trainer.compute_loss

        def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            trainer.compute_loss = compute_loss
            tokens = inputs.get("input_ids")
            self.tokens = None if tokens is None else tokens.numel()
            with self:
                return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = counted


def _flops_of(function: Any, given: Any, named: Any, result: Any) -> int | None:
    """Return the FLOPs of an operation; ``None`` for an operation that does not count."""
    packet = function.overloadpacket
    if packet._qualified_op_name in ("aten::_grouped_mm", "aten::_scaled_grouped_mm"):
        # Each row of the first is multiplied by one matrix of the second.
        return 2 * int(given[0].shape[-2]) * int(given[0].shape[-1]) * int(given[1].shape[-1])
    if packet._qualified_op_name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    formula = flop_registry.get(packet)
    if formula is None:
        return None
    if "attention" in packet.__name__:
        given = _with_all_heads(given, axis=1 if "scaled_dot_product" in packet.__name__ else -2)
    return int(formula(*given, **named, out_val=result))


def _with_all_heads(given: Any, axis: int) -> Any:
    """Return attention inputs with keys and values expanded to all heads, as torch 2.11's formulas require."""
    query, *others = given[:3]
    whole = []
    for each in others:
        shape = list(each.shape)
        shape[axis] = query.shape[axis]
        whole.append(each.new_empty(shape, device="meta"))
    return (query, *whole, *given[3:])


def _gradients(function: Any, given: Any) -> int:
    """Return the number of inputs of a product that get a gradient."""
    matrices = [each for each in given if isinstance(each, torch.Tensor) and each.dim() > 1]
    if "attention" in function.__name__:
        # Of queries by keys, and of the result by values.
        return 2 * matrices[0].requires_grad
    return sum(each.requires_grad for each in matrices[-2:])
