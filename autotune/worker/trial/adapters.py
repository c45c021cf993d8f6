"""Add LoRA adapters to a model, and quantize its frozen weights to 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer

from autotune.core.errors import InvalidRequestError
from autotune.core.workload import Workload
from autotune.models.tasks import PEFT_TASKS

# Of random weights, which have to be of some size: that of most language models' configs.
_DEVIATION = 0.02
_LINEAR = (torch.nn.Linear, Conv1D)


def quantization_config(workload: Workload) -> Any:
    """Return the quantization config for ``from_pretrained``; ``None`` where weights are not quantized."""
    if workload.quantize is None:
        return None
    arguments = workload.bits_arguments()
    if "bnb_4bit_compute_dtype" in arguments:
        arguments["bnb_4bit_compute_dtype"] = getattr(torch, arguments["bnb_4bit_compute_dtype"])
    return BitsAndBytesConfig(**arguments)


def with_lora(model: Any, workload: Workload) -> Any:
    """Return a model with LoRA adapters on its frozen weights.

    Raises ``InvalidRequestError`` for a rank that exceeds a layer, and for a target that no layer is called.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    # peft has no task type for image classification, whose new head has to be trained all the same.
    has_head = workload.task == "image-classification" and hasattr(model, "classifier")
    config = LoraConfig(
        **workload.lora_arguments(),
        task_type=PEFT_TASKS.get(workload.task),
        modules_to_save=["classifier"] if has_head else None,
    )
    targets = (workload.lora_options or {}).get("target_modules", [])
    for target in targets:
        if not any(name.endswith(target) for name, _ in model.named_modules()):
            linear = {name.rpartition(".")[2] for name, part in model.named_modules() if type(part) in _LINEAR}
            raise InvalidRequestError(
                f"--lora-targets: no layer is called {target}", f"its linear layers are {', '.join(sorted(linear))}"
            )
    adapted = get_peft_model(model, config)
    for name, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer) and config.r > min(layer.in_features, layer.out_features):
            size = f"{layer.in_features} × {layer.out_features}"
            least = min(layer.in_features, layer.out_features)
            raise InvalidRequestError(
                f"LoRA of rank {config.r} exceeds {name.rpartition('.')[2]} of {size}",
                f"use --lora-rank {least} or less",
            )
    return adapted


def quantize_at_random(model: Any, workload: Workload, device: torch.device) -> Any:
    """Return a model from the ``meta`` device with random weights on a device, those of its linear layers in few bits.

    As ``from_pretrained`` makes it of saved weights: it chooses the layers, and quantizes each weight as it comes. So
    building takes the memory of the model and of one more weight.
    """
    quantizer = AutoHfQuantizer.from_config(quantization_config(workload), pre_quantized=False)
    quantizer.preprocess_model(model, dtype=getattr(torch, workload.dtype), device_map={"": device})
    made: dict[int, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in made:
            made[id(tensor)] = _random_weight(model, name, tensor, quantizer, workload, device)
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        (module._parameters if own in module._parameters else module._buffers)[own] = made[id(tensor)]
    # Draws the weights that are in full precision, and computes buffers such as those of rotary embeddings.
    model.initialize_weights()
    model.hf_quantizer = quantizer
    return quantizer.postprocess_model(model)


def _random_weight(
    model: Any, name: str, tensor: Any, quantizer: Any, workload: Workload, device: torch.device
) -> torch.Tensor:
    """Return a tensor for a parameter or buffer on ``meta``; one that is not in few bits has no values yet."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if not quantizer.param_needs_quantization(model, f"{path}.weight"):
        value = torch.empty_like(tensor, device=device)
        return torch.nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else value
    dtype = getattr(torch, workload.dtype)
    if own != "weight":
        bias = torch.zeros(tensor.shape, dtype=dtype, device=device)
        return _finished(torch.nn.Parameter(bias, requires_grad=False))
    drawn = torch.empty(tensor.shape, dtype=dtype, device=device).normal_(std=_DEVIATION)
    # Saved weights of such layers lie the other way round, and are turned while they are quantized.
    drawn = drawn.T if issubclass(module.source_cls, Conv1D) else drawn
    quantized = quantizer.get_quantize_ops().convert({name: drawn}, model=model, full_layer_name=name)
    return _finished(quantized[name])


def _finished(value: torch.Tensor) -> torch.Tensor:
    """Keep transformers from drawing values for a tensor."""
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    return value
