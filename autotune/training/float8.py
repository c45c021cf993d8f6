"""Multiply in FP8: the linear layers of a model's repeated layers, by torchao's dynamic scaling.

Activations and weights are rounded to e4m3 and gradients to e5m2, each tensor with a scale of its own, for the product
alone (Micikevicius et al. 2022, FP8 Formats for Deep Learning); weights stay as they are. This is another numeric.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from autotune.training.errors import SettingUnavailableError
from autotune.training.layers import repeated_layers

# FP8 products need dimensions of whole multiples of this (torch._scaled_mm).
_MULTIPLE = 16
_LEAST_CAPABILITY = (8, 9)


def _supports_float8(module: torch.nn.Module, _name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and not (
        module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    )


def multiply_in_float8(trainer: Trainer, **config: Any) -> None:
    """Make the linear layers within a ``Trainer``'s repeated layers multiply in FP8. ``config`` is for torchao.

    Embeddings and output layers, which lie outside, stay in 16 bits. Raises ``SettingUnavailableError`` where torchao
    is not installed, the GPU has no FP8 units, or no layer has fitting dimensions.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise SettingUnavailableError(f"FP8 needs torchao: {error}") from error
    device = trainer.args.device
    has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    if not config.get("emulate") and not has_units:
        raise SettingUnavailableError(f"{device} has no FP8 units")
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers = list(repeated_layers(model))
    if not any(_supports_float8(module, "") for layer in layers for module in layer.modules()):
        raise SettingUnavailableError(
            f"no repeated layer of {type(model).__name__} has a torch.nn.Linear of multiples of {_MULTIPLE}"
        )
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=_supports_float8, config=Float8LinearConfig(**config))
