"""Compute the memory of weights, gradients and optimizer state, and refuse a limit that is below it."""

from __future__ import annotations

import math

from autotune.core.errors import NothingFitsError
from autotune.core.inspection import ModelFacts
from autotune.core.units import GIB, MIB, format_bytes, format_count
from autotune.core.workload import BYTES_PER_ELEMENT
from autotune.devices import Headroom
from autotune.devices.host import host_memory
from autotune.tuning.request import SearchRequest
from autotune.tuning.strategies import least_share, may_offload

# Optimizers of TrainingArguments that keep two moments in the weights' dtype, as Adam does. The state of others, which
# is smaller, is not counted, since a request may only be refused for what is certain.
_FULL_ADAM = frozenset({"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_apex_fused"})
# Of each trained parameter in the host's memory with zero2-offload: the float32 weight and gradient, and two moments
# (DeepSpeedZeroOptimizer with cpu_offload, in deepspeed/runtime/zero/stage_1_and_2.py).
_HOST_BYTES = 16


def training_state_bytes(request: SearchRequest, model: ModelFacts) -> int:
    """Return the least memory of any step of this workload: weights, gradients, optimizer state."""
    moments = 2 if _FULL_ADAM.issuperset(request.optims) else 0
    trained, frozen = model.trainable_parameters, model.parameters - model.trainable_parameters
    element_bytes = BYTES_PER_ELEMENT[request.workload.dtype]
    # Layers that are not quantized take more; this is a lower bound.
    bits = int(request.workload.quantize[0]) if request.workload.quantize else element_bytes * 8
    return trained * (2 + moments) * element_bytes + frozen * bits // 8


def _offloaded_bytes(request: SearchRequest, model: ModelFacts) -> int:
    """Return the least memory of a step that keeps its optimizer state on the host: that of the model's weights.

    Raises ``NothingFitsError`` where the host has too little memory for the rest.
    """
    host_bytes, free_bytes = _HOST_BYTES * model.trainable_parameters, host_memory().free_bytes
    if request.is_at_hand and free_bytes is not None and free_bytes < host_bytes:
        raise NothingFitsError(
            f"--strategy zero2-offload keeps {format_bytes(host_bytes)} of {request.workload.model} in the host's "
            f"memory, where {format_bytes(free_bytes)} are free",
            "use a smaller model, or leave it out",
        )
    is_half = {"bf16", "fp16"}.intersection(request.chosen_precisions)
    return model.parameters * (2 if is_half else BYTES_PER_ELEMENT[request.workload.dtype])


def _least_bytes(state_bytes: int, context_bytes: int, headroom: Headroom) -> int:
    """Return the smallest memory limit whose line is not below the training state."""
    if headroom.size_bytes is not None:
        return state_bytes + headroom.size_bytes + context_bytes
    return math.ceil(state_bytes / (1 - headroom.fraction)) + context_bytes + 1


def check_training_state_fits(request: SearchRequest, model: ModelFacts, context_bytes: int) -> None:
    """Raise ``NothingFitsError`` where the memory limit, or what is free, is below the training state and headroom."""
    device, limit_bytes = request.device, request.memory_limit_bytes
    whole_bytes = training_state_bytes(request, model)
    state_bytes = whole_bytes // least_share(request, model, whole_bytes)
    if may_offload(request, whole_bytes):
        state_bytes = min(state_bytes, _offloaded_bytes(request, model))
    least_bytes = _least_bytes(state_bytes, context_bytes, request.headroom)
    free_bytes, reachable_bytes = request.least_free_bytes, request.reachable_bytes
    if reachable_bytes >= least_bytes:
        return
    where = "a memory limit of" if reachable_bytes == limit_bytes else f"what is free on {device.label},"
    beside = "CUDA context and headroom" if context_bytes else "headroom"
    # Rounded up, so that the limit is large enough.
    unit, name = (GIB, "GiB") if least_bytes >= GIB else (MIB, "MiB")
    needed = f"{math.ceil(least_bytes / unit * 100) / 100:g}"
    enough = f"--memory-limit {needed}{name}" if least_bytes <= free_bytes else f"a device with {needed} {name} free"
    ways = [f"use {enough} or more", "a smaller model"]
    if request.workload.dtype == "float32":
        ways.append("--dtype bfloat16")
    raise NothingFitsError(
        f"{where} {format_bytes(reachable_bytes)} is too little for {request.workload.model}: the weights, gradients "
        f"and optimizer state of its {format_count(model.parameters)} parameters alone take "
        f"{format_bytes(state_bytes)}, with {beside} {needed} {name}, before a single sample",
        f"{', '.join(ways[:-1])} or {ways[-1]}",
    )
