"""Stand-ins for bitsandbytes: what its layers and optimizers allocate, without values, kernels or the package.

After bitsandbytes 0.50 (``nn/modules.py``, ``autograd/_functions.py``, ``backends/cuda/ops.py``,
``optim/optimizer.py``) and peft 0.21 (``tuners/lora/bnb.py``), on a GPU. A product of few tokens may run without the
buffer; a training's have many.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from autotune.core.workload import Workload

# Weights that share a scale, and scales that share one in their turn.
_BLOCK, _BLOCK_OF_SCALES = 64, 256
# Smaller parameters have their moments in float32; smaller moments are not paged; moments that share a scale.
_LEAST_8_BIT, _LEAST_PAGED, _BLOCK_OF_MOMENTS = 4096, 100_000, 256
_PARTS_OF_PEFT = (".lora_", ".modules_to_save.")


def quantize_fake(model: torch.nn.Module, workload: Workload) -> None:
    """Replace linear layers that bitsandbytes would quantize by fake ones on ``meta``, also within adapters."""
    base = model.get_base_model() if workload.peft else model  # type: ignore[operator]
    skipped = workload.bits_arguments().get("llm_int8_skip_modules")
    spared = HfQuantizer.get_modules_to_not_convert(base, skipped, base._keep_in_fp32_modules)
    for name, module in list(base.named_modules()):
        if type(module) not in (torch.nn.Linear, Conv1D) or any(part in f".{name}" for part in _PARTS_OF_PEFT):
            continue
        if not should_convert_module(name.removesuffix(".base_layer"), spared):
            continue
        made = _FourBits(module, workload) if workload.quantize == "4bit" else _EightBits(module, workload)
        base.set_submodule(name, made)
        if name.endswith(".base_layer"):
            # Around such layers, peft's adapters take the input as autocast leaves it.
            base.get_submodule(name.removesuffix(".base_layer"))._cast_input_dtype = lambda inputs, dtype: (
                inputs if torch.is_autocast_enabled("cpu") else inputs.to(dtype)
            )


class _FewBits(torch.nn.Module):
    """What both widths have in common: their size, and a bias in full precision."""

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
    """``Linear4bit``: two weights a byte, a scale of a byte for each block, a float for each block of scales."""

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
        # peft copies it before it adds what the adapter says.
        copied: torch.Tensor = product.to(inputs.dtype).clone()
        return copied


class _FourBitProduct(torch.autograd.Function):
    """A product with a weight that is dequantized for it, in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, size: tuple[int, int], scales: Any) -> Any:
        ctx.size, ctx.scales = size, scales.numel()
        return torch.nn.functional.linear(inputs, _dequantized(size, ctx.scales, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient_of_input = torch.matmul(gradient, _dequantized(ctx.size, ctx.scales, gradient.dtype))
        return gradient_of_input, None, None, None, None


def _dequantized(size: tuple[int, int], scales: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized weight, with its scales in memory meanwhile."""
    in_full = torch.zeros(scales)
    weight = torch.zeros(size, dtype=dtype)
    del in_full
    return weight


class _EightBits(_FewBits):
    """``Linear8bitLt``: a weight a byte, a scale for each output."""

    def __init__(self, layer: Any, workload: Workload) -> None:
        super().__init__(layer, workload)
        self._set_weight(torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta"))
        self.register_buffer("scales", torch.empty(self.out_features, device="meta"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _EightBitProduct.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call, no-any-return]


class _EightBitProduct(torch.autograd.Function):
    """A product of whole numbers, for which the input is quantized; the backward pass dequantizes the weight."""

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
        # Kept for the backward pass, which does not read it.
        ctx.inputs, ctx.weight, ctx.dtype = flat, weight, inputs.dtype
        product = product.to(inputs.dtype)
        return (product if bias is None else product + bias).reshape(*inputs.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        flat = gradient.reshape(-1, gradient.shape[-1]).to(ctx.dtype)
        in_full = torch.zeros(ctx.weight.shape, dtype=ctx.dtype)
        product = torch.matmul(flat, in_full)
        return product.view(*gradient.shape[:-1], ctx.weight.shape[1]), None, None


class FewBitsOptimizer(torch.optim.Optimizer):
    """An optimizer of bitsandbytes: its state in a byte for each weight and moment, or in managed memory (paged).

    Small parameters and, as the Trainer has it, embeddings keep their state in float32. Managed memory is no part of
    what torch's allocator reserves; a GPU that is full moves it to the host.
    """

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        super().__init__([parameter for parameter in model.parameters() if parameter.requires_grad], {})
        self._moments = 1 if "lion" in name else 2
        self._is_paged = name.startswith("paged_")
        self._bits = 8 if name.endswith("8bit") else 32
        embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
        self._in_full = {id(module.weight) for module in embeddings}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Allocate the optimizer state of each parameter with a gradient, and touch the memory of an update."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            if not self.state[parameter]:
                is_small = parameter.numel() < _LEAST_8_BIT or id(parameter) in self._in_full
                few = self._bits == 8 and not is_small
                tensors: list[torch.Tensor] = []
                for _ in range(self._moments):
                    if not self._is_paged or parameter.numel() < _LEAST_PAGED:
                        tensors.append(torch.zeros_like(parameter, dtype=torch.uint8 if few else torch.float32))
                    if few:
                        tensors.append(torch.zeros(-(-parameter.numel() // _BLOCK_OF_MOMENTS)))
                self.state[parameter].update(enumerate(tensors))
            parameter.add_(parameter.grad)
            for moment in self.state[parameter].values():
                moment.add_(0)
