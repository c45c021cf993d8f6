"""Make fake CPU tensors allocate as CUDA tensors do: autocast, dropout, attention, bitsandbytes' layers and optimizers.

Functions and kernels are replaced in the whole process. Dispatch modes would not do: they are not active inside the
autograd engine, and the recomputation of a checkpoint would take another path.

The substitutes for bitsandbytes follow its version 0.50 (``nn/modules.py``, ``autograd/_functions.py``,
``backends/cuda/ops.py``, ``optim/optimizer.py``) and peft 0.21 (``tuners/lora/bnb.py``), on a GPU. A product of few
tokens may run without the buffer of a dequantized weight; those of a training have many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from autotune.core.device import Chip
from autotune.core.workload import Workload
from autotune.worker.private.torch import replace_attention, without_cpu_autocast
from autotune.worker.private.transformers import decide_masks_without_values

# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32: operations that CUDA autocast computes in float32 and CPU autocast does
# not cast. Reductions to a scalar are left out, since their memory does not matter.
_FLOAT32_OPERATIONS = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "cosine_similarity", "nll_loss", "nll_loss2d", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss",
    "mse_loss", "binary_cross_entropy_with_logits", "logsumexp",
)  # fmt: skip
# AT_FORALL_FP32_SET_OPT_DTYPE: autocast sets the dtype argument instead of casting the input first.
_FLOAT32_BY_ARGUMENT = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList", "prod")

# Operations that CPU autocast casts and CUDA autocast does not: there logits stay in 16 bits up to the loss itself.
_CPU_ONLY_FLOAT32_OPERATIONS = ("cross_entropy_loss",)

_HALF = (torch.float16, torch.bfloat16)
_HARDWARE = {"flash": True}
"""Whether the simulated GPU has flash attention; set by ``install_cuda_semantics``."""


def _aten_operation(name: str) -> Any:
    """Return the operation of torch with this name, such as ``softmax.int``; without an overload, the default one."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _cast_to_float32(operation: Any) -> Callable[..., Any]:
    """Return an autocast kernel: a function that casts 16-bit arguments to float32 and calls ``operation``."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            return operation(
                *(_to_float32(a) for a in args), **{name: _to_float32(value) for name, value in kwargs.items()}
            )

    return kernel


def _to_float32(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _set_dtype(operation: Any) -> Callable[..., Any]:
    """Return an autocast kernel: a function that calls ``operation`` with ``dtype=torch.float32`` for 16-bit inputs."""

    def kernel(input: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if args and (args[-1] is None or isinstance(args[-1], torch.dtype)):
            # cross_entropy_loss passes the dtype by position: the dtype of the logits, which is kept.
            *args, dtype = args  # type: ignore[assignment]
        if dtype is None and input.dtype in _HALF:
            dtype = torch.float32
        with without_cpu_autocast():
            return operation(input, *args, dtype=dtype, **kwargs)

    return kernel


@functools.cache
def _install_cuda_autocast() -> torch.library.Library:
    """Make CPU autocast cast to float32 for the operations for which CUDA's does, for the rest of this process.

    The replaced kernels last as long as the returned library, which the cache keeps. torch 2.11 refuses a second one.
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
    """Stand in for ``torch.nn.functional.dropout`` with CUDA's fused kernel, whose mask takes one byte per element."""
    if not training or p == 0.0:
        return input
    return torch.ops.aten.native_dropout(input, p, True)[0]  # type: ignore[no-any-return]


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout_p: float,
               is_causal: bool, scale: float | None) -> torch.Tensor:  # fmt: skip
    """Compute attention by the memory-efficient kernel, with the mask as a bias that is padded as on CUDA."""
    bias = mask
    if bias is not None:
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
        length = bias.shape[-1]
        if length % 16:
            # The kernel needs rows aligned to 16 elements: a padded copy, of which a view is used.
            bias = functional.pad(bias, (0, 16 - length % 16))[..., :length]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], length)
    return torch.ops.aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool,
           scale: float | None) -> torch.Tensor:  # fmt: skip
    """Compute attention by the flash kernel, with head sizes padded to multiples of 8 as on CUDA."""
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
    """Compute attention in float32 without a fused kernel, as _scaled_dot_product_attention_math (attention.cpp)."""
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
    """Stand in for ``scaled_dot_product_attention``: use the kernel that CUDA would select (order of sdp_utils.cpp)."""
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
    """Make fake CPU tensors allocate as tensors on ``chip``, for the rest of this process.

    Autocast, dropout and attention become CUDA's. transformers takes samples as not packed, and attention masks as full
    unless samples are ``padded``: it decides both by tensor values, which fake tensors lack, and would otherwise keep a
    mask that a real step drops.
    """
    _install_cuda_autocast()
    _HARDWARE["flash"] = chip.has_flash_attention
    decide_masks_without_values(padded=padded)
    functional.dropout = _dropout
    torch.dropout = lambda input, p, train: _dropout(input, p, train)
    replace_attention(_attention)


# The formats of bitsandbytes: numbers of weights that share a scale, and of scales that share a scale of their own.
_BLOCK, _BLOCK_OF_SCALES = 64, 256
# Numbers of elements: smaller parameters have their moments in float32; smaller ones are not paged; moments that share
# a scale.
_LEAST_8_BIT, _LEAST_PAGED, _BLOCK_OF_MOMENTS = 4096, 100_000, 256
_PARTS_OF_PEFT = (".lora_", ".modules_to_save.")


def quantize_fake(model: torch.nn.Module, workload: Workload) -> None:
    """Replace the layers that bitsandbytes would quantize, within adapters too, by stand-ins that allocate alike."""
    base = model.get_base_model() if workload.peft else model  # type: ignore[operator]
    skipped = workload.bits_arguments().get("llm_int8_skip_modules")
    spared = HfQuantizer.get_modules_to_not_convert(base, skipped, base._keep_in_fp32_modules)
    for name, module in list(base.named_modules()):
        if type(module) not in (torch.nn.Linear, Conv1D) or any(part in f".{name}" for part in _PARTS_OF_PEFT):
            continue
        if not should_convert_module(name.removesuffix(".base_layer"), spared):
            continue
        stand_in = _FourBits if workload.quantize == "4bit" else _EightBits
        base.set_submodule(name, stand_in(module, workload))
        if name.endswith(".base_layer"):
            # peft's adapters around such layers do not cast their input under autocast.
            base.get_submodule(name.removesuffix(".base_layer"))._cast_input_dtype = lambda inputs, dtype: (
                inputs if torch.is_autocast_enabled("cpu") else inputs.to(dtype)
            )


class _FewBits(torch.nn.Module):
    """Base of the stand-ins for bitsandbytes' layers in few bits: the size, and a bias in the workload's dtype."""

    def __init__(self, layer: Any, workload: Workload) -> None:
        super().__init__()
        inputs, outputs = layer.weight.shape if isinstance(layer, Conv1D) else reversed(layer.weight.shape)
        self.in_features, self.out_features = int(inputs), int(outputs)
        self._dtype = getattr(torch, workload.dtype)
        bias = layer.bias
        self.bias = None if bias is None else torch.nn.Parameter(bias.to(self._dtype), requires_grad=False)

    def _set_weight(self, weight: torch.Tensor) -> None:
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


class _FourBits(_FewBits):
    """Stands in for ``Linear4bit``: two weights a byte, a byte for each block's scale, a float for 256 scales."""

    def __init__(self, layer: Any, workload: Workload) -> None:
        super().__init__(layer, workload)
        weights = self.in_features * self.out_features
        scales = -(-weights // _BLOCK)
        self._set_weight(torch.empty(-(-weights // 2), 1, dtype=torch.uint8, device="meta"))
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"))
        self.register_buffer("scales_of_scales", torch.empty(-(-scales // _BLOCK_OF_SCALES), device="meta"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        size = (self.out_features, self.in_features)
        converted = inputs.to(self._dtype)
        product = _FourBitProduct.apply(converted, self.weight, self.bias, size, self.scales)  # type: ignore[no-untyped-call]
        # peft copies the product before it adds the adapter's output.
        return product.to(inputs.dtype).clone()  # type: ignore[no-any-return]


class _FourBitProduct(torch.autograd.Function):
    """Multiplies by a 4-bit weight of a full ``size``, which is dequantized in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, size: tuple[int, int], scales: Any) -> Any:
        ctx.size, ctx.scales = size, scales.numel()
        return torch.nn.functional.linear(inputs, _dequantized(size, ctx.scales, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient_of_input = torch.matmul(gradient, _dequantized(ctx.size, ctx.scales, gradient.dtype))
        return gradient_of_input, None, None, None, None


def _dequantized(size: tuple[int, int], scales: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a dequantized weight, of zeros; its ``scales`` in float32 are in memory meanwhile, and then freed."""
    float_scales = torch.zeros(scales)
    weight = torch.zeros(size, dtype=dtype)
    del float_scales
    return weight


class _EightBits(_FewBits):
    """Stands in for ``Linear8bitLt``: a byte for each weight, a float for the scale of each output."""

    def __init__(self, layer: Any, workload: Workload) -> None:
        super().__init__(layer, workload)
        self._set_weight(torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta"))
        self.register_buffer("scales", torch.empty(self.out_features, device="meta"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _EightBitProduct.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call, no-any-return]


class _EightBitProduct(torch.autograd.Function):
    """Allocates as bitsandbytes' 8-bit product: of a quantized input, and backward with a dequantized weight."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any) -> Any:
        flat = inputs.reshape(-1, inputs.shape[-1])
        half = flat.to(torch.float16)
        outliers = half.abs() >= 6.0
        quantized, scales = torch.zeros_like(flat, dtype=torch.int8), torch.zeros(flat.shape[0])
        del outliers, half
        whole = torch.zeros(flat.shape[0], weight.shape[0], dtype=torch.int32)
        # Where the input is in bfloat16, the product is converted once more.
        product = torch.zeros(whole.shape, dtype=torch.float16)
        del whole, quantized, scales
        # The input is kept for the backward pass, which does not read it.
        ctx.inputs, ctx.weight, ctx.dtype = flat, weight, inputs.dtype
        product = product.to(inputs.dtype)
        return (product if bias is None else product + bias).reshape(*inputs.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        flat = gradient.reshape(-1, gradient.shape[-1]).to(ctx.dtype)
        dequantized = torch.zeros(ctx.weight.shape, dtype=ctx.dtype)
        product = torch.matmul(flat, dequantized)
        return product.view(*gradient.shape[:-1], ctx.weight.shape[1]), None, None


class FewBitsOptimizer(torch.optim.Optimizer):
    """Allocates as the optimizer of bitsandbytes with this ``name``, which says whether its state is 8-bit or paged.

    8-bit state takes a byte for each weight and moment; small parameters and, as the Trainer has it, embeddings keep
    float32. Paged state is in CUDA's managed memory, which is no part of what torch's allocator reserves.
    """

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        super().__init__([parameter for parameter in model.parameters() if parameter.requires_grad], {})
        self._moments = 1 if "lion" in name else 2
        self._is_paged = name.startswith("paged_")
        self._bits = 8 if name.endswith("8bit") else 32
        embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
        self._float32_weights = {id(module.weight) for module in embeddings}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Allocate the state of each parameter with a gradient at its first step, and run an update's operations."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            if not self.state[parameter]:
                is_float32 = parameter.numel() < _LEAST_8_BIT or id(parameter) in self._float32_weights
                is_8_bit = self._bits == 8 and not is_float32
                tensors: list[torch.Tensor] = []
                for _ in range(self._moments):
                    if not self._is_paged or parameter.numel() < _LEAST_PAGED:
                        tensors.append(torch.zeros_like(parameter, dtype=torch.uint8 if is_8_bit else torch.float32))
                    if is_8_bit:
                        tensors.append(torch.zeros(-(-parameter.numel() // _BLOCK_OF_MOMENTS)))
                self.state[parameter].update(enumerate(tensors))
            parameter.add_(parameter.grad)
            for moment in self.state[parameter].values():
                moment.add_(0)
