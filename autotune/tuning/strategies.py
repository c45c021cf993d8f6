"""Choose how the ranks of a search share the model, and what each way of sharing sets besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.candidate import FSDP, STRATEGIES, ZERO_STAGES, Arm, Strategy
from autotune.core.inspection import ModelFacts
from autotune.core.workload import BYTES_PER_ELEMENT
from autotune.devices.host import host_memory
from autotune.space.features import DEEPSPEED, shards_with, version_of
from autotune.tuning.request import SearchRequest

_LARGE_COPY = 0.01
"""Share of a GPU's memory above which a second copy of the gradients is avoided. Predictions keep as much free."""


def arms_of_ranks(arms: Sequence[Arm], request: SearchRequest, model: ModelFacts, state_bytes: int) -> tuple[Arm, ...]:
    """Return the arms with every strategy that they can be trained with, those with the least communication first.

    ``state_bytes`` is what weights, gradients and optimizer state take together.
    """
    strategies = _strategies(request, model, state_bytes)
    accumulates = request.effective_batch is not None
    variants = [(strategy, False) for strategy in strategies]
    # Without accumulation every micro-step reduces its gradients anyway.
    # Of DeepSpeed's stages the first never does so, and the others always.
    variants += [(strategy, True) for strategy in strategies if strategy in FSDP and accumulates]
    return tuple(
        _shared(arm, strategy, syncs, request, model)
        for strategy, syncs in variants
        for arm in arms
        if strategy == "ddp" or (shards_with(arm.optim) and not (strategy in ZERO_STAGES and arm.torch_compile))
    )


def arms_of_one(arms: Sequence[Arm], request: SearchRequest, state_bytes: int) -> tuple[Arm, ...]:
    """Return the arms of a single rank, with those that keep the optimizer state on the host where these may be needed.

    ``state_bytes`` is what weights, gradients and optimizer state take together.
    """
    offloading = tuple(
        replace(arm, strategy="zero2-offload", cpu_affinity=False)
        for arm in arms
        if shards_with(arm.optim) and not arm.torch_compile
    )
    if request.strategies is not None:
        return offloading
    return (*arms, *offloading) if may_offload(request, state_bytes) else tuple(arms)


def may_offload(request: SearchRequest, state_bytes: int) -> bool:
    """Return whether a search may keep the optimizer state on the host.

    If that was not asked for, only where a rank's share of weights, gradients and optimizer state takes more than half
    of the memory (with less, small batches fit), and the host has memory for all of it.
    """
    if request.strategies is not None:
        return "zero2-offload" in request.strategies
    if request.workload.source is not None or request.workload.quantize or request.workload.peft:
        return False
    if request.device.kind != "cuda" or version_of(DEEPSPEED) is None:
        return False
    host_bytes = host_memory().free_bytes
    is_large = 2 * state_bytes // request.ranks > request.reachable_bytes
    return is_large and (host_bytes is None or host_bytes > state_bytes or not request.is_at_hand)


def least_share(request: SearchRequest, model: ModelFacts, state_bytes: int) -> int:
    """Return by how many ranks weights, gradients and optimizer state are divided at most; 1 where they are whole."""
    if request.ranks == 1 or all(strategy == "ddp" for strategy in _strategies(request, model, state_bytes)):
        return 1
    return request.ranks


def _strategies(request: SearchRequest, model: ModelFacts, state_bytes: int) -> tuple[Strategy, ...]:
    """Return the strategies to search."""
    asked = request.strategies
    if asked is not None:
        return tuple(strategy for strategy in STRATEGIES if strategy in asked)
    can_split = (
        request.device.kind == "cuda"
        # What the user's own code allocates is not predicted on several ranks, so that sharding it has to be asked for.
        and request.workload.source is None
        and request.workload.quantize is None
        # Gradients of adapters are few, so that DDP exchanges next to nothing. There sharding only saves memory, which
        # is searched where the weights take more than half of it.
        and (request.workload.peft is None or 2 * state_bytes > request.reachable_bytes)
        and any(map(shards_with, request.optims))
    )
    strategies: list[Strategy] = ["ddp"]
    if can_split:
        with_fsdp = bool(model.layer_classes) and not model.sharding_error
        # Adapters under DeepSpeed were not tried.
        with_zero = version_of(DEEPSPEED) is not None and request.workload.peft is None
        strategies += [s for s in STRATEGIES if (s in FSDP and with_fsdp) or (s in ZERO_STAGES and with_zero)]
        if not may_offload(request, state_bytes):
            strategies = [strategy for strategy in strategies if strategy != "zero2-offload"]
    return tuple(strategies)


def _shared(arm: Arm, strategy: Strategy, syncs: bool, request: SearchRequest, model: ModelFacts) -> Arm:
    """Return the arm as several ranks train it.

    Where every parameter was seen to get a gradient, DDP need not look for unused ones in each step; where no buffer
    was seen to change, rank 0 has none to send. Neither changes a value.
    """
    ranks = request.ranks
    if strategy == "ddp":
        uses_all = model.after_step.unused_parameters == ()
        return replace(
            arm,
            strategy=strategy,
            ranks=ranks,
            ddp_find_unused_parameters=_is_copy_large(request, model) if uses_all else None,
            ddp_broadcast_buffers=False if model.after_step.changed_buffers == () else None,
        )
    if strategy in ZERO_STAGES:
        return replace(arm, strategy=strategy, ranks=ranks)
    layers = ",".join(model.layer_classes)
    return replace(arm, strategy=strategy, ranks=ranks, transformer_layer_cls_to_wrap=layers, sync_each_batch=syncs)


def _is_copy_large(request: SearchRequest, model: ModelFacts) -> bool:
    """Return whether a second copy of DDP's buckets would keep batches from fitting, see ``Arm.rebuilds_buckets``.

    DDP that looks for unused parameters keeps its buckets. The search for them took no measurable time in steps of 65
    and 110 ms of BERT-large (two H200, torch 2.11, 22 November 2026).
    """
    if request.device.kind != "cuda":
        return False
    copy_bytes = model.trainable_parameters * BYTES_PER_ELEMENT[request.workload.dtype]
    return copy_bytes > _LARGE_COPY * request.reachable_bytes
