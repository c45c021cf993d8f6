"""Choose how the ranks of a search share weights, gradients and optimizer state.

A memory limit that is below what a rank holds of them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.core.candidate import FSDP, STRATEGIES, ZERO_STAGES, Arm, Strategy, group_size
from autotune.core.ceiling import LARGE_GRADIENTS
from autotune.core.errors import NothingFitsError
from autotune.core.inspection import ModelFacts
from autotune.core.units import GIB, MIB, format_bytes, format_count
from autotune.core.workload import BYTES_PER_ELEMENT
from autotune.devices.host import host_memory
from autotune.space.features import DEEPSPEED, shards_with, version_of
from autotune.tuning.request import SearchRequest

# Optimizers of TrainingArguments that keep two moments in the weights' dtype, as Adam does. The state of others, which
# is smaller, is not counted, since a request may only be refused for what is certain.
_FULL_ADAM = frozenset({"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_apex_fused"})
# Bytes of each trained parameter on the host with zero2-offload: the float32 weight and gradient, and two moments
# (DeepSpeedZeroOptimizer with cpu_offload, in deepspeed/runtime/zero/stage_1_and_2.py).
_HOST_BYTES = 16


def arms_with_strategies(arms: Sequence[Arm], request: SearchRequest, model: ModelFacts) -> tuple[Arm, ...]:
    """Return the arms (configurations without batch) with every strategy to search, those with few exchanges first.

    A strategy is how ranks share the model, such as DDP. Arms of a single rank have none, or keep their optimizer state
    on the host where memory may require it.
    """
    if request.ranks == 1:
        return _arms_of_one(arms, request, model)
    strategies = _strategies(request, model)
    accumulates = request.effective_batch is not None
    variants = [(strategy, False) for strategy in strategies]
    # FSDP may also reduce gradients in every micro-step, which is no difference without accumulation. DeepSpeed's first
    # stage never does so, its other stages always.
    variants += [(strategy, True) for strategy in strategies if strategy in FSDP and accumulates]
    return tuple(
        shared(arm, strategy, request, model, syncs=syncs)
        for strategy, syncs in variants
        for arm in arms
        if strategy == "ddp" or (shards_with(arm.optim) and not (strategy in ZERO_STAGES and arm.torch_compile))
    )


def _arms_of_one(arms: Sequence[Arm], request: SearchRequest, model: ModelFacts) -> tuple[Arm, ...]:
    """Return the arms of a single rank, and those with the optimizer state on the host (zero2-offload) where useful."""
    offloading = tuple(
        replace(arm, strategy="zero2-offload", cpu_affinity=False)
        for arm in arms
        if shards_with(arm.optim) and not arm.torch_compile
    )
    if request.strategies is not None:
        return offloading
    return (*arms, *offloading) if _may_offload(request, model) else tuple(arms)


def _may_offload(request: SearchRequest, model: ModelFacts) -> bool:
    """Return whether a search may keep the optimizer state on the host.

    Unless requested, only where a rank's weights, gradients and optimizer state take more than half of the memory (with
    less, small batches fit), and the host has memory for the state.
    """
    if request.strategies is not None:
        return "zero2-offload" in request.strategies
    if request.workload.source is not None or request.workload.quantize or request.workload.peft:
        return False
    if request.device.kind != "cuda" or version_of(DEEPSPEED) is None:
        return False
    host_bytes, state_bytes = host_memory().free_bytes, training_state_bytes(request, model)
    is_large = 2 * state_bytes // request.ranks > request.reachable_bytes
    return is_large and (host_bytes is None or host_bytes > state_bytes or not request.is_at_hand)


def _strategies(request: SearchRequest, model: ModelFacts) -> tuple[Strategy, ...]:
    """Return the strategies to search on several ranks: the requested ones, else all that model and GPUs can have."""
    asked = request.asked_strategies
    if asked is not None:
        return tuple(strategy for strategy in STRATEGIES if strategy in asked)
    can_split = (
        request.device.kind == "cuda"
        # What the user's own code allocates is not predicted on several ranks, so that sharding it has to be asked for.
        and request.workload.source is None
        and request.workload.quantize is None
        # Gradients of adapters are few, so that DDP exchanges next to nothing. There sharding only saves memory, which
        # is searched where the weights take more than half of it.
        and (request.workload.peft is None or 2 * training_state_bytes(request, model) > request.reachable_bytes)
        and any(map(shards_with, request.optims))
    )
    if not can_split:
        return ("ddp",)
    possible: set[Strategy] = {"ddp"}
    if model.layer_classes and not model.sharding_error:
        possible.update(FSDP)
    # Adapters under DeepSpeed were not tried.
    if version_of(DEEPSPEED) is not None and request.workload.peft is None:
        possible.update(ZERO_STAGES)
    if not _may_offload(request, model):
        possible.discard("zero2-offload")
    if group_size(request.ranks) is None:
        possible.discard("hybrid")
    return tuple(strategy for strategy in STRATEGIES if strategy in possible)


def shared(arm: Arm, strategy: Strategy, request: SearchRequest, model: ModelFacts, *, syncs: bool = False) -> Arm:
    """Return the arm with a strategy on all ranks of the request, and the settings that follow from the strategy.

    Where every parameter got a gradient in the inspection, DDP need not look for unused parameters; it still does where
    that saves memory (``_is_copy_large``). Where no buffer changed, rank 0 has none to broadcast. Neither setting
    changes a result. ``syncs`` has FSDP reduce gradients in each micro-step.
    """
    arm = replace(arm, strategy=strategy, ranks=request.ranks)
    if strategy == "ddp":
        uses_all = model.after_step.unused_parameters == ()
        return replace(
            arm,
            ddp_find_unused_parameters=_is_copy_large(request, model) if uses_all else None,
            ddp_broadcast_buffers=False if model.after_step.changed_buffers == () else None,
        )
    if strategy in ZERO_STAGES:
        return arm
    return replace(
        arm,
        transformer_layer_cls_to_wrap=",".join(model.layer_classes),
        dp_shard_size=group_size(request.ranks) if strategy == "hybrid" else None,
        sync_each_batch=syncs,
        context_parallel=request.context_parallel,
    )


def _is_copy_large(request: SearchRequest, model: ModelFacts) -> bool:
    """Return whether a second set of DDP's gradient buckets would take much of the memory.

    DDP makes new buckets in the second step, beside the first ones, unless it looks for unused parameters. Looking took
    no measurable time in steps of 65 and 110 ms of BERT-large (two H200, torch 2.11, 22 November 2026).
    """
    if request.device.kind != "cuda":
        return False
    copy_bytes = model.trainable_parameters * BYTES_PER_ELEMENT[request.workload.dtype]
    return copy_bytes > LARGE_GRADIENTS * request.reachable_bytes


def training_state_bytes(request: SearchRequest, model: ModelFacts) -> int:
    """Return the size of weights, gradients and optimizer state, below which no step of this workload fits."""
    moments = 2 if _FULL_ADAM.issuperset(request.optims) else 0
    trained, frozen = model.trainable_parameters, model.parameters - model.trainable_parameters
    element_bytes = BYTES_PER_ELEMENT[request.workload.dtype]
    # Some layers are not quantized and take more: this is a lower bound.
    bits = int(request.workload.quantize[0]) if request.workload.quantize else element_bytes * 8
    return trained * (2 + moments) * element_bytes + frozen * bits // 8


def _offloaded_bytes(request: SearchRequest, model: ModelFacts) -> int:
    """Return the smallest device memory of a step with the optimizer state on the host: the model's weights.

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


def check_training_state_fits(request: SearchRequest, model: ModelFacts, context_bytes: int) -> None:
    """Raise ``NothingFitsError`` where training state and headroom exceed the memory limit or the free memory."""
    device, limit_bytes = request.device, request.memory_limit_bytes
    state_bytes = training_state_bytes(request, model)
    if request.ranks > 1 and any(strategy != "ddp" for strategy in _strategies(request, model)):
        state_bytes //= request.ranks
    if _may_offload(request, model):
        state_bytes = min(state_bytes, _offloaded_bytes(request, model))
    # The smallest memory limit whose line is not below the training state.
    if request.headroom.size_bytes is not None:
        least_bytes = state_bytes + request.headroom.size_bytes + context_bytes
    else:
        least_bytes = math.ceil(state_bytes / (1 - request.headroom.fraction)) + context_bytes + 1
    free_bytes, reachable_bytes = request.least_free_bytes, request.reachable_bytes
    if reachable_bytes >= least_bytes:
        return
    where = "a memory limit of" if reachable_bytes == limit_bytes else f"what is free on {device.label},"
    beside = "CUDA context and headroom" if context_bytes else "headroom"
    # Rounded up, so that the limit is large enough.
    unit, name = (GIB, "GiB") if least_bytes >= GIB else (MIB, "MiB")
    needed = f"{math.ceil(least_bytes / unit * 100) / 100:g}"
    enough = f"--memory-limit {needed}{name}" if least_bytes <= free_bytes else f"a device with {needed} {name} free"
    ways = [f"use {enough} at least, and more for the samples", "a smaller model"]
    if request.workload.dtype == "float32":
        ways.append("--dtype bfloat16")
    raise NothingFitsError(
        f"{where} {format_bytes(reachable_bytes)} is too little for {request.workload.model}: the weights, gradients "
        f"and optimizer state of its {format_count(model.parameters)} parameters alone take "
        f"{format_bytes(state_bytes)}, with {beside} {needed} {name}, before a single sample",
        f"{', '.join(ways[:-1])} or {ways[-1]}",
    )
