"""Build the model of a workload, with random weights unless pretrained ones were asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D

from autotune.core.workload import Workload
from autotune.models.tasks import AUTO_CLASS_OF_TASK
from autotune.space.precision_names import HALF
from autotune.worker.private.transformers import class_for_config
from autotune.worker.trial.adapters import quantization_config, quantize_at_random, with_lora


def auto_class(workload: Workload) -> Any:
    """Return the ``AutoModelFor…`` class of the workload's task."""
    return getattr(transformers, AUTO_CLASS_OF_TASK[workload.task])


def build_config(workload: Workload) -> Any:
    """Return the ``PretrainedConfig``, with the workload's dtype in place of the file's."""
    facts = {key: value for key, value in workload.config.items() if key not in ("model_type", "torch_dtype", "dtype")}
    config = AutoConfig.for_model(workload.model_type, **facts)
    if workload.task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        # Decoders need one to find the last token that is not padding.
        config.pad_token_id = 0
    return config


def model_class(workload: Workload) -> Any:
    """Return the class of the model. Importing it before the fork saves each trial the import.

    Raises ``ValueError`` where transformers has no class for this task and model type.
    """
    try:
        return class_for_config(auto_class(workload), build_config(workload))
    except KeyError as error:
        raise ValueError(f"transformers has no {workload.task} model of type {workload.model_type!r}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_liger_knows(model_type: str) -> None:
    """Raise ``ValueError`` where Liger has no kernels for a model; the Trainer would only log that and go on."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        names = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ValueError(f"Liger has no kernels for models of type {model_type!r}; it has them for {names}")


def in_deepspeeds_dtype(workload: Workload, precision: str) -> Workload:
    """Return the workload with weights in the dtype to which DeepSpeed converts a model.

    A ``Trainer`` leaves the model on the CPU until DeepSpeed has converted it, so that its float32 weights never have
    to fit on the GPU. Built in 16 bits on the GPU it takes as much memory, and seconds less.
    """
    return dataclasses.replace(workload, dtype=HALF.get(precision, "float32"))


def build_model(workload: Workload, attn_implementation: str, device: torch.device) -> Any:
    """Build the model in training mode on ``device``, with weights in the workload's dtype.

    Weights are made on the device, or read from their files to it one after the other: the host never holds them all.
    """
    dtype = getattr(torch, workload.dtype)
    is_on_meta = device.type == "meta"
    with _quiet():
        if workload.weights:
            # ZeRO-3 reads them itself, and gives each rank its part.
            streamed = {} if is_deepspeed_zero3_enabled() else {"device_map": {"": device}}
            model = auto_class(workload).from_pretrained(
                workload.weights,
                dtype=dtype,
                attn_implementation=attn_implementation,
                quantization_config=quantization_config(workload),
                **streamed,
            )
        else:
            drawn_later = workload.quantize is not None and not is_on_meta
            with torch.device("meta" if drawn_later else device):
                model = auto_class(workload).from_config(
                    build_config(workload), dtype=dtype, attn_implementation=attn_implementation
                )
            model = quantize_at_random(model, workload, device) if drawn_later else model
        with torch.device(device):
            model = with_lora(model, workload) if workload.peft == "lora" else model
    return model.train()


def linear_weights(model: torch.nn.Module) -> tuple[int, int]:
    """Return how many weights the linear layers of a model have, and how many of them are trained.

    Quantized ones are counted by the size of the layer, since several share an element.
    """
    every = trained = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            count = module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            count = module.weight.numel()
        else:
            continue
        every += count
        trained += count if module.weight.requires_grad else 0
    return every, trained
