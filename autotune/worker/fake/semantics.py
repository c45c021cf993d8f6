"""Make fake CPU tensors allocate as CUDA tensors do: autocast's casts, dropout and attention kernels.

Functions and kernels are replaced in the whole process. Dispatch modes would not do: they are not active inside the
autograd engine, and the recomputation of a checkpoint would take another path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional

from autotune.core.chip import Chip
from autotune.worker.private.torch import replace_attention, without_cpu_autocast
from autotune.worker.private.transformers import decide_masks_without_values

# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32: operations that CUDA autocast computes in float32 and CPU autocast does
# not cast. Reductions to a scalar are left out, since their memory does not matter.
_FLOAT32_OPERATIONS = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "cosine_similarity",
    "nll_loss",
    "nll_loss2d",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "binary_cross_entropy_with_logits",
    "logsumexp",
)
# AT_FORALL_FP32_SET_OPT_DTYPE: autocast sets the dtype argument instead of casting the input first.
_FLOAT32_BY_ARGUMENT = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList", "prod")

# In the list of CPU autocast but not of CUDA, where logits stay in 16 bits up to the loss itself.
_CPU_ONLY_FLOAT32_OPERATIONS = ("cross_entropy_loss",)

_HALF = (torch.float16, torch.bfloat16)
_HARDWARE = {"flash": True}


def _aten_operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _cast_to_float32(operation: Any) -> Callable[..., Any]:
    """Return an autocast kernel that casts 16-bit arguments to float32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            return operation(
                *(_to_float32(a) for a in args),
                **{name: _to_float32(value) for name, value in kwargs.items()},
            )

    return kernel


def _to_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _HALF:
        return value.to(torch.float32)
    return value


def _set_dtype(operation: Any) -> Callable[..., Any]:
    """Return an autocast kernel that computes with ``dtype=torch.float32`` for 16-bit inputs."""

    def kernel(input: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if args and (args[-1] is None or isinstance(args[-1], torch.dtype)):
            # Given by position, as cross_entropy_loss does. It is the dtype of the logits, which is kept.
            *args, dtype = args  # type: ignore[assignment]
        if dtype is None and input.dtype in _HALF:
            dtype = torch.float32
        with without_cpu_autocast():
            return operation(input, *args, dtype=dtype, **kwargs)

    return kernel


@functools.cache
def _install_cuda_autocast() -> torch.library.Library:
    """Make CPU autocast use CUDA's list of float32 operations, for the rest of this process.

    The library has to stay alive. torch 2.11 refuses a second one.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")  # type: ignore[no-untyped-call]
    for name in _FLOAT32_OPERATIONS:
        library.impl(name, _cast_to_float32(_aten_operation(name)), "AutocastCPU")  # type: ignore[no-untyped-call]
    for name in _FLOAT32_BY_ARGUMENT:
        library.impl(name, _set_dtype(_aten_operation(name)), "AutocastCPU")  # type: ignore[no-untyped-call]
    for name in _CPU_ONLY_FLOAT32_OPERATIONS:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")  # type: ignore[no-untyped-call]
    return library


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Apply CUDA's fused dropout, whose boolean mask takes one byte per element."""
    if not training or p == 0.0:
        return input
    out: torch.Tensor = torch.ops.aten.native_dropout(input, p, True)[0]
    return out


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout_p: float,
               is_causal: bool, scale: float | None) -> torch.Tensor:  # fmt: skip
    """Compute attention by the memory-efficient kernel, with a bias padded as on CUDA."""
    bias = None
    if mask is not None:
        bias = mask
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
        length = bias.shape[-1]
        if length % 16:
            # The kernel needs rows aligned to 16 elements: a padded copy, of which a view is used.
            bias = functional.pad(bias, (0, 16 - length % 16))[..., :length]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], length)
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool,
           scale: float | None) -> torch.Tensor:  # fmt: skip
    """Compute attention by the flash kernel, with head sizes padded as on CUDA."""
    size = query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if size % 8:
        query, key, value = (functional.pad(t, (0, 8 - size % 8)) for t in (query, key, value))
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :size] if size % 8 else out


def _math(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout_p: float,
          is_causal: bool, scale: float | None) -> torch.Tensor:  # fmt: skip
    """Compute attention as _scaled_dot_product_attention_math of transformers/attention.cpp, in float32."""
    dtype = query.dtype
    if dtype in _HALF:
        query, key, value = (t.to(torch.float32) for t in (query, key, value))
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(allowed.logical_not(), float("-inf"))
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    # Names are bound as in the C++ code: a tensor lives until its name is bound again or the function ends.
    query = query * root
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        weights.add_(mask.to(query.dtype))
    weights = torch.ops.aten._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.ops.aten.native_dropout(weights, dropout_p, True)[0]
    # The second result, which is never used. GCC evaluates arguments from the last to the first.
    unused = weights.to(dtype)
    out = torch.matmul(weights, value).to(dtype)
    del unused
    return out


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention with the kernel that CUDA would select (sdp_utils.cpp, priority order)."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) for t in (query, key, value))
        if attn_mask is not None and attn_mask.dtype.is_floating_point:
            attn_mask = attn_mask.to(dtype)
    with without_cpu_autocast():
        if _HARDWARE["flash"] and attn_mask is None and query.dtype in _HALF and query.shape[-1] <= 256:
            # Flash attention reads grouped key and value heads in place, without repeating them.
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if not enable_gqa and (attn_mask is None or not attn_mask.requires_grad):
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        # The memory-efficient kernel supports neither grouped heads nor the gradient of a mask.
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)


def install_cuda_semantics(chip: Chip, *, padded: bool) -> None:
    """Make fake CPU tensors allocate as on a chip, for the rest of this process.

    Dropout and attention are replaced by CUDA's kernels. Samples are never packed, and masks are full unless samples
    are ``padded``. transformers decides both by tensor values, which fake tensors lack; without this it would keep a
    mask that a real step drops.
    """
    _install_cuda_autocast()
    _HARDWARE["flash"] = chip.has_flash_attention
    decide_masks_without_values(padded=padded)
    functional.dropout = _dropout
    torch.dropout = lambda input, p, train: _dropout(input, p, train)
    replace_attention(_attention)
