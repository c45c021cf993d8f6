"""Add LoRA adapters to a model, and quantize its frozen weights to 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from autotune.core.workload import Workload
from autotune.models.tasks import PEFT_TASKS


def adapt(model: Any, workload: Workload) -> Any:
    """Return the model with its weights quantized and LoRA adapters added, as far as the workload asks for it."""
    if workload.quantize is not None and next(model.parameters()).device.type != "meta":
        _quantize(model, workload)
    return _with_lora(model, workload) if workload.peft == "lora" else model


def quantization_config(workload: Workload) -> Any:
    """Return the quantization config for ``from_pretrained``; ``None`` where weights are not quantized."""
    if workload.quantize is None:
        return None
    from transformers import BitsAndBytesConfig

    if workload.quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, workload.dtype)
    )


def _with_lora(model: Any, workload: Workload) -> Any:
    from peft import LoraConfig, get_peft_model

    rank = workload.lora_rank
    assert rank is not None, "an adapter has a rank"
    # peft has no task type for image classification, whose new head has to be trained all the same.
    has_head = workload.task == "image-classification" and hasattr(model, "classifier")
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type=PEFT_TASKS.get(workload.task),
        modules_to_save=["classifier"] if has_head else None,
    )
    return get_peft_model(model, config)


def _quantize(model: Any, workload: Workload) -> None:
    """Quantize every linear layer but the head in place, as ``from_pretrained`` does with real weights."""
    if getattr(model, "is_quantized", False):
        return
    import bitsandbytes

    device = next(model.parameters()).device
    spared = _heads(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name in spared:
            continue
        made = _in_few_bits(bitsandbytes, module, workload)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made.to(device))


def _in_few_bits(bitsandbytes: Any, module: torch.nn.Linear, workload: Workload) -> Any:
    size = (module.in_features, module.out_features, module.bias is not None)
    # bitsandbytes quantizes while moving weights to the device, so they have to start on the host.
    weight = module.weight.data.cpu()
    if workload.quantize == "8bit":
        made = bitsandbytes.nn.Linear8bitLt(*size, has_fp16_weights=False, threshold=6.0)
        made.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        made = bitsandbytes.nn.Linear4bit(*size, compute_dtype=getattr(torch, workload.dtype), quant_type="nf4")
        made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    if module.bias is not None:
        made.bias = torch.nn.Parameter(module.bias.data.cpu(), requires_grad=False)
    return made


def _heads(model: Any) -> set[str]:
    """Return the names of layers that are not quantized: the output embedding, and the last child, a new head."""
    output = model.get_output_embeddings()
    last = [name for name, _ in model.named_children()][-1]
    found = {name for name, module in model.named_modules() if module is output}
    return found | {name for name, _ in model.named_modules() if name == last or name.startswith(f"{last}.")}
