"""Choose how the ranks of a search share the model, and what each way of sharing sets besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.candidate import STRATEGIES, Arm, Strategy
from autotune.core.errors import InvalidRequestError
from autotune.core.inspection import ModelFacts
from autotune.space.features import DEEPSPEED, shards_with, version_of
from autotune.tuning.request import SearchRequest


def arms_of_ranks(arms: Sequence[Arm], request: SearchRequest, model: ModelFacts) -> tuple[Arm, ...]:
    """Return the arms with every strategy that they can be trained with, those with the least communication first.

    Raises ``InvalidRequestError`` for a strategy that was asked for and that the model cannot do.
    """
    strategies = _strategies(request, model)
    accumulates = request.effective_batch is not None
    variants = [(strategy, False) for strategy in strategies]
    # Without accumulation every micro-step reduces its gradients anyway.
    # Of DeepSpeed's stages the first never does so, and the others always.
    variants += [(strategy, True) for strategy in strategies if Arm(strategy=strategy).is_sharded and accumulates]
    return tuple(
        _shared(arm, strategy, syncs, request.ranks, model)
        for strategy, syncs in variants
        for arm in arms
        if strategy == "ddp" or (shards_with(arm.optim) and not (is_zero(strategy) and arm.torch_compile))
    )


def is_zero(strategy: Strategy) -> bool:
    """Return whether a strategy is one of DeepSpeed's."""
    return Arm(strategy=strategy).zero_stage is not None


def least_share(request: SearchRequest, model: ModelFacts) -> int:
    """Return by how many ranks weights, gradients and optimizer state are divided at most; 1 where they are whole."""
    if request.ranks == 1 or all(strategy == "ddp" for strategy in _strategies(request, model)):
        return 1
    return request.ranks


def _strategies(request: SearchRequest, model: ModelFacts) -> tuple[Strategy, ...]:
    """Return the strategies to search."""
    asked = request.strategies
    has_layers = bool(model.layer_classes)
    if asked is not None:
        sharded = [strategy for strategy in asked if Arm(strategy=strategy).is_sharded]
        if sharded and not has_layers:
            raise InvalidRequestError(
                f"--strategy {sharded[0]}: {model.class_name} has no class of layers to shard one by one",
                "use --strategy ddp",
            )
        if sharded and (error := model.sharding_error):
            raise InvalidRequestError(
                f"--strategy {sharded[0]}: accelerate cannot shard {model.class_name}: {error}", "use --strategy ddp"
            )
        return tuple(strategy for strategy in STRATEGIES if strategy in asked)
    can_split = (
        request.device.kind == "cuda"
        and request.workload.source is None
        and request.workload.quantize is None
        # Adapters on a sharded model were not tried.
        and request.workload.peft is None
        and any(map(shards_with, request.optims))
    )
    found: list[Strategy] = ["ddp"]
    if can_split:
        with_fsdp = has_layers and not model.sharding_error
        with_zero = version_of(DEEPSPEED) is not None
        found += [s for s in STRATEGIES if (Arm(strategy=s).is_sharded and with_fsdp) or (is_zero(s) and with_zero)]
    return tuple(found)


def _shared(arm: Arm, strategy: Strategy, syncs: bool, ranks: int, model: ModelFacts) -> Arm:
    """Return the arm as several ranks train it.

    Where every parameter was seen to get a gradient, DDP has none to look for in each step; where no buffer was seen to
    change, rank 0 has none to send. Neither changes a value.
    """
    if strategy == "ddp":
        return replace(
            arm,
            strategy=strategy,
            ranks=ranks,
            ddp_find_unused_parameters=False if model.after_step.unused_parameters == () else None,
            ddp_broadcast_buffers=False if model.after_step.changed_buffers == () else None,
        )
    if is_zero(strategy):
        return replace(arm, strategy=strategy, ranks=ranks)
    layers = ",".join(model.layer_classes)
    return replace(arm, strategy=strategy, ranks=ranks, transformer_layer_cls_to_wrap=layers, sync_each_batch=syncs)
