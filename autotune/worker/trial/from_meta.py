"""Shard a model between ranks before it has weights: no rank ever holds more than its part and one module.

A model on the ``meta`` device has shapes and no values. It is sharded as accelerate does it; then the weights of one
module after the other are made on the device, of which every rank keeps its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers import initialization as init

from autotune.core.workload import Workload
from autotune.worker.private.accelerate import shard_for
from autotune.worker.trial.build import build_model

# Of weights that no model draws, such as DoRA's magnitudes: any number that is not zero.
_UNDRAWN = 0.02


def built_or_on_meta(
    workload: Workload, attn_implementation: str, device: torch.device, *, shards: bool, compiles: bool
) -> tuple[Any, bool]:
    """Return the model of a training, and whether it is on ``meta``, to be sharded before it has weights.

    Compiled models are wrapped before they are sharded, which is the Trainer's to do, and bitsandbytes' weights are
    quantized whole.
    """
    if shards and not compiles and workload.quantize is None:
        return on_meta(workload, attn_implementation), True
    return build_model(workload, attn_implementation, device), False


def shard_from_meta(trainer: Any, workload: Workload) -> None:
    """Shard the model of a ``Trainer`` that has not begun to train, and give it its weights: random, or from files.

    The model is on ``meta``. Of weights from files, the first rank holds all in the host's memory and sends one after
    the other to the others.
    """
    device = trainer.accelerator.device
    shard_for(trainer.accelerator, trainer.model)
    fill(trainer.model, device)
    if workload.weights:
        _take_from_files(trainer.model, workload, device)


def on_meta(workload: Workload, attn_implementation: str) -> Any:
    """Return the model without values, also where its weights are in files."""
    return build_model(dataclasses.replace(workload, weights=None), attn_implementation, torch.device("meta"))


@torch.no_grad()
def fill(model: Any, device: torch.device) -> None:
    """Give a model on ``meta``, sharded or whole, random weights on a device; the same ones for the same seed.

    Every rank draws all of them in the same order, each as its own module is drawn: T5 and Whisper draw a few of them
    anew for a module around theirs, which is not done here. No training begins from these weights.
    """
    model.to_empty(device=device)
    # peft's models hand it on to the model inside.
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    with init.guard_torch_init_functions():
        for module, owner in _with_owners(model, None):
            if owner is not None:
                _fill_module(module, owner)


def _with_owners(module: Any, owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield modules, children first, each with the model of transformers around it, which knows how to draw it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        yield from _with_owners(child, owner)
    yield module, owner


def _fill_module(module: Any, owner: Any) -> None:
    """Draw a module's own weights in full, and keep this rank's part."""
    parts: dict[str, DTensor] = {}
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is None or getattr(tensor, "_is_hf_initialized", False):
                continue
            if isinstance(tensor, DTensor):
                parts[name] = tensor
                whole = torch.full(tensor.shape, _UNDRAWN, dtype=tensor.dtype, device=tensor.device)
                own[name] = torch.nn.Parameter(whole, tensor.requires_grad)
            else:
                tensor.fill_(_UNDRAWN)
    owner._init_weights(module)
    for name, part in parts.items():
        _keep_part(part, module._parameters[name])
        module._parameters[name] = part
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            # Not drawn again where it is tied, or by a module around this one.
            tensor._is_hf_initialized = True


def _keep_part(part: DTensor, whole: torch.Tensor) -> None:
    # Without communication: every rank has the whole.
    mine = distribute_tensor(whole.detach(), part.device_mesh, part.placements, src_data_rank=None)
    part.to_local().copy_(mine.to_local())


@torch.no_grad()
def _take_from_files(model: Any, workload: Workload, device: torch.device) -> None:
    is_first = dist.get_rank() == 0
    saved = build_model(workload, "eager", torch.device("cpu")).state_dict() if is_first else {}
    for name, tensor in model.state_dict().items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if is_first:
            whole.copy_(saved.pop(name))
        dist.broadcast(whole, src=0)
        if isinstance(tensor, DTensor):
            _keep_part(tensor, whole)
        else:
            tensor.copy_(whole)
