"""Report what only a process with torch can tell: versions, and facts about the model."""

from __future__ import annotations

import dataclasses
import itertools
import platform
from collections import Counter
from typing import Any

import torch

from autotune.core.errors import InvalidRequestError
from autotune.core.inspection import AfterStep, Inspection, ModelFacts, Software
from autotune.core.messages import InspectionWork
from autotune.core.workload import Workload
from autotune.space.features import version_of
from autotune.worker.checkpointing import outermost
from autotune.worker.failures import first_line
from autotune.worker.private.accelerate import why_no_fsdp2
from autotune.worker.private.transformers import (
    attention_implementations,
    checkpointing_layers,
    modules_not_to_split,
    optimizer_names,
)
from autotune.worker.rendezvous import lacks_nccl
from autotune.worker.trial.build import model_class, on_meta
from autotune.worker.trial.run import known_fields

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "nvidia-ml-py")


def package_versions() -> dict[str, str | None]:
    """Return the installed versions of libraries that affect measurements; ``None`` for missing ones."""
    return {name: version_of(name) for name in _PACKAGES}


def layer_classes(model: torch.nn.Module) -> list[str]:
    """Return the class names of the model's layers, which FSDP wraps one by one; empty without layers.

    Layers are the elements of the outermost module lists. Where the model names modules that must not be split, these
    are used; else the classes with at least half as many parameters as the largest class.
    """
    lists = outermost([module for module in model.modules() if isinstance(module, torch.nn.ModuleList)])
    parameters: Counter[str] = Counter()
    for layer in itertools.chain.from_iterable(lists):
        parameters[type(layer).__name__] += sum(parameter.numel() for parameter in layer.parameters())
    named = [name for name in modules_not_to_split(model) if parameters.get(name)]
    if named:
        return sorted(named)
    largest = max(parameters.values(), default=0)
    return sorted(name for name, count in parameters.items() if 2 * count >= largest > 0)


def _model_facts(workload: Workload, ranks: int) -> ModelFacts:
    """Return facts about the model, built on ``meta``; for several ranks, also if it shards, and what DDP can skip."""
    model_type: Any = model_class(workload)
    attentions = attention_implementations(model_type)
    model = on_meta(workload, "sdpa" if "sdpa" in attentions else "eager")
    sharding_error = why_no_fsdp2()
    layers = tuple(layer_classes(model)) if sharding_error is None else ()
    # Only matrices are quantized. Those of experts are stacked in a tensor of three dimensions. Position embeddings may
    # have three dimensions, too, the first of size 1.
    modules = (module for module in model.modules() if not isinstance(module, torch.nn.modules.conv._ConvNd))
    weights = (weight for module in modules for weight in module.parameters(recurse=False))
    experts = sum(weight.numel() for weight in weights if weight.dim() == 3 and weight.shape[0] > 1)
    after_step = AfterStep()
    if ranks > 1:
        from autotune.worker.fake.ranks import what_ddp_can_skip, why_not_sharded

        after_step = what_ddp_can_skip(workload)
        if layers:
            sharding_error = why_not_sharded(workload, layers, ranks)
    return ModelFacts(
        model_type.__name__,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        tuple(attentions),
        gradient_checkpointing=bool(getattr(model, "supports_gradient_checkpointing", False)),
        checkpointing_layers=checkpointing_layers(model),
        layer_classes=layers,
        sharding_error=sharding_error,
        unquantized_experts=experts if workload.quantize else 0,
        after_step=after_step,
    )


def inspect(workload: Workload, work: InspectionWork) -> Inspection:
    """Return facts about the environment and the model; ``model_error`` where it cannot be built."""
    inspection = dataclasses.replace(inspect_environment(), lacks_nccl=lacks_nccl(work.devices))
    try:
        return dataclasses.replace(inspection, model=_model_facts(workload, work.devices.ranks))
    except InvalidRequestError as error:
        return dataclasses.replace(inspection, model_error=error.message, model_hint=error.hint)
    except Exception as error:
        return dataclasses.replace(inspection, model_error=first_line(error))


def inspect_environment() -> Inspection:
    """Return facts about the environment; ``autotune.worker.gpu_facts`` adds those of the GPU."""
    software = Software(platform.python_version(), package_versions(), tuple(sorted(known_fields())))
    return Inspection(software, optims=tuple(optimizer_names()))
