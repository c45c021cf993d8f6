"""Torch's kernel of flash attention for samples of several lengths in one row, as one operator that compilers and CUDA
graphs take as it is.

``torch.nn.attention.varlen`` calls the same kernel without dropout, and in some versions without a window.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("autotune::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    window: int,
    dropout: float,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return causal attention within samples, the logarithms of its sums, and the state of its random numbers.

    ``query``: (tokens, heads, size); ``key``, ``value``: (tokens, as many heads or fewer, size); all in 16 bits.
    ``ends``: (samples + 1), where each begins, and the end, as int32. ``longest``: the tokens of the longest, or more.
    ``window``: how many tokens a token attends to, or 0 for all before it.
    """
    left, right = (window - 1, 0) if window else (None, None)
    attended, sums, state, _, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, dropout, not window, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return attended, sums, state.clone()


@attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query), sums, query.new_empty(2, dtype=torch.uint64)


@torch.library.custom_op("autotune::attend_backward", mutates_args=())
def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    sums: torch.Tensor,
    state: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    window: int,
    dropout: float,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right = (window - 1, 0) if window else (None, None)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        gradient.contiguous(), query, key, value, attended, sums, ends, ends, longest, longest, dropout, not window,
        state, query.new_empty(0), scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return of_query, of_key, of_value


@_attend_backward.register_fake
def _(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, ends, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, ends)


def _backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    return (*_attend_backward(gradient, *ctx.saved_tensors, *ctx.rest), *[None] * 5)


attend.register_autograd(_backward, setup_context=_save)
