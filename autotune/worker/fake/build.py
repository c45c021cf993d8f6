"""Build a model whose parameters and buffers are fake tensors, which have shapes and no values."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from autotune.core.workload import Workload
from autotune.worker.fake.tracer import StorageTracer
from autotune.worker.trial.build import build_model


def build_fake_model(workload: Workload) -> Any:
    """Return the model of a workload in random weights, as in training; call it under a mode of fake tensors.

    It is built on the ``meta`` device first: ``Module.to``, by which peft places its adapters, cannot move parameters
    that are fake tensors already.
    """
    attention = "eager" if workload.task == "seq2seq-lm" else "sdpa"
    model = build_model(dataclasses.replace(workload, weights=None), attention, torch.device("meta"))
    materialise(model)
    return model


def materialise(model: torch.nn.Module, tracer: StorageTracer | None = None) -> None:
    """Replace every ``meta`` parameter and buffer by a fake one on the CPU, and have the tracer see them.

    A tied parameter is allocated for each of its owners, and the copies are freed when they are tied.
    """
    made: dict[int, Any] = {}
    copies: list[int] = []
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            is_trainable = own is module._parameters
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if tracer is not None:
                        tracer.see(fake, "weights")
                    made[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_trainable else fake
                elif is_trainable and tracer is not None:
                    copies.append(tracer.hold("weights", tensor.nbytes))
                own[name] = made[id(tensor)]
    for number in copies:
        assert tracer is not None
        tracer.let_go(number)
