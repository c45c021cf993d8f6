"""Refuse a request that cannot be searched: before a process is started, and once the model was inspected."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.core.candidate import FSDP, FULLY_SHARDED, OWN_OPTIM, ZERO_STAGES, Strategy, group_size
from autotune.core.errors import DeviceError, InvalidRequestError, UnknownModelError, near_misses
from autotune.core.inspection import Inspection, ModelFacts
from autotune.core.options import BY_NAME
from autotune.core.units import format_bytes
from autotune.space.features import (
    DEEPSPEED,
    FLASH_ATTENTION,
    is_state_known,
    major_minor,
    optim_package,
    packages_of_workload,
    require,
    require_compiler,
    shards_with,
    version_of,
)
from autotune.space.levers import BY_NAME as LEVER_BY_NAME
from autotune.space.levers import EXPERTS, LEVERS, Lever, Training, why_not
from autotune.tuning.request import DEFAULT_OPTIM, SearchRequest


def check_request(request: SearchRequest) -> None:
    """Raise an error for every mistake in a request that can be found before a process is started."""
    # These properties raise where batches or precisions are impossible.
    _ = request.batches, request.chosen_precisions
    _check_ranks_of_own_code(request)
    # Before the levers, which may ask for packages to be installed.
    _check_context_parallel(request)
    _check_strategies(request)
    _check_levers(request)
    if request.device.memory_free_bytes == 0:
        total = format_bytes(request.device.memory_total_bytes)
        raise DeviceError(f"{request.device.label} has no free memory of its {total}", "end what holds it")


def _check_levers(request: SearchRequest) -> None:
    """Raise an error for a lever whose package is not installed, or that the device does not support."""
    for optim in request.optims:
        package = optim_package(optim)
        if package is not None and (request.is_at_hand or not is_state_known(optim)):
            require(package, f"--optim {optim}")
    if request.workload.quantize is not None and request.workload.peft is None:
        raise InvalidRequestError(
            f"weights in {request.workload.quantize[0]} bits cannot be trained directly", "add --peft lora"
        )
    # Predictions for other GPUs do without bitsandbytes, whose memory is computed, but not without peft's modules.
    needed = packages_of_workload(request.workload)
    for package in needed if request.is_at_hand else set(needed) - {"bitsandbytes"}:
        require(package, "--quantize" if package == "bitsandbytes" else "--peft lora")
    is_cpu = request.device.kind == "cpu"
    if request.expandable_segments == "on" and is_cpu:
        raise DeviceError("cpu has no allocator with expandable segments", "leave that lever at auto or off")
    if request.cpu_affinity == "on" and (problem := request.why_not_pinned()) is not None:
        raise DeviceError(f"{BY_NAME['cpu_affinity'].said('on')}: {problem}", "leave it at auto or off")
    if request.liger != "off":
        if is_cpu:
            raise DeviceError("cpu cannot run Liger's kernels", "leave it off, or choose a GPU")
        require("liger-kernel", BY_NAME["liger"].said(request.liger))
    if request.float8 == "on":
        if is_cpu or (request.device.capability or (0, 0)) < _FLOAT8_SINCE:
            raise DeviceError(f"{request.device.name} has no FP8 units", "leave float8 off")
        require("torchao", BY_NAME["float8"].said("on"))
    if request.torch_compile in ("on", "layers") and request.is_at_hand:
        require_compiler(request.device.kind, BY_NAME["torch_compile"].said(request.torch_compile))
    _check_experts(request)
    _check_settings(request, _MANY_LAYERS)
    if FLASH_ATTENTION in (request.attn_implementations or ()):
        if is_cpu:
            raise DeviceError(f"cpu has no {FLASH_ATTENTION}", "leave it out of --attn, or choose a GPU")
        require("flash-attn", f"--attn {FLASH_ATTENTION}")


# Compute capability with FP8 units (CUDA C++ Programming Guide).
_FLOAT8_SINCE = (8, 9)

# Fields in which configs keep the number of experts, themselves or in one of their parts.
_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PARTS_WITH_EXPERTS = ("text_config", "ffn_config")


def _check_experts(request: SearchRequest) -> None:
    """Raise ``InvalidRequestError`` for unknown implementations of experts, and for a model without experts."""
    implementations = request.experts_implementations or ()
    config = request.workload.config
    parts = [config, *(config.get(name) or {} for name in _PARTS_WITH_EXPERTS)]
    if implementations and not any(part.get(name) for part in parts for name in _EXPERTS_FIELDS):
        raise InvalidRequestError(
            f"--experts {','.join(implementations)}: autotune finds no experts in the config of "
            f"{request.workload.model}",
            "leave it out",
        )
    for name in implementations:
        if name not in EXPERTS:
            raise InvalidRequestError(f"--experts {name} is not known", f"use some of {', '.join(EXPERTS)}")


_MANY_LAYERS = 2**31
"""Number of layers that is assumed where the model was not inspected yet: no request has more."""


# The first transformers whose checkpointing takes ``offload`` (modeling_utils of 5.16 and 5.17 compared).
_OFFLOADS_SINCE = (5, 17)


def _check_settings(request: SearchRequest, layers: int | None) -> None:
    """Raise ``InvalidRequestError`` for a requested lever that this training cannot have.

    ``layers`` is the number of layers that can use gradient checkpointing; ``None`` where single layers cannot.
    """
    training = Training.of(request.workload, request.device.kind, request.ranks, layers)
    settings = request.settings()
    _check_together(request, settings)
    for row in LEVERS:
        # ``True`` only allows the search to try a lever, such as another order of samples. Arms need not have it.
        is_allowed = row.option is not None and getattr(request, row.option) is True
        if row.option is None or (row.name not in settings and not is_allowed):
            continue
        # With ``length_multiple`` samples have few lengths, so that shapes hardly vary for the other levers.
        has_few_shapes = "length_multiple" in settings and row.name != "length_multiple" and not is_allowed
        why = why_not(row, dataclasses.replace(training, shapes_vary=training.shapes_vary and not has_few_shapes))
        if row.part_of == "gradient_checkpointing" and request.gradient_checkpointing == "off":
            why = "nothing is recomputed with --gradient-checkpointing off"
        if is_allowed and not request.goes_on:
            why = "it is tried after the first answer, by autotune's own sampler, on a GPU and with --effort default"
        if why is not None:
            option = BY_NAME[row.option]
            said = option.parameter if is_allowed else option.said(getattr(request, row.option))
            raise InvalidRequestError(f"{said}: {why}", "leave it out")
    asked = settings.get("checkpointed_layers", 0)
    if layers is not None and asked > layers:
        raise InvalidRequestError(
            f"{BY_NAME['partial_checkpointing'].said(asked)}: the model has {layers} layers", "leave it at auto or off"
        )
    if "offload_activations" in settings and request.is_at_hand:
        version = version_of("transformers") or ""
        if major_minor(version) < _OFFLOADS_SINCE:
            raise InvalidRequestError(
                f"{BY_NAME['offload_activations'].said('on')}: transformers {version} cannot, which 5.17 and later do",
                "upgrade transformers, or leave it out",
            )


def _check_together(request: SearchRequest, settings: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequestError`` for two requested settings that exclude each other."""
    asked = {**settings, "use_liger_kernel": True} if request.liger == "on" else settings
    packs = request.workload.data is not None and request.workload.data.packing
    for row in LEVERS:
        beside = [LEVER_BY_NAME[name] for name in row.excludes if name in asked]
        if row.name not in asked or not beside:
            continue
        mine, other = (_option_of(each) for each in (row, beside[0]))
        if row.name == "padding_free" and packs:
            raise InvalidRequestError(f"--packing does not go with {other}", "leave one of them out")
        raise InvalidRequestError(f"{mine} does not go with {other}", "leave one of them out")


def _option_of(row: Lever) -> str:
    """Return the option of the command line that turns a lever's setting on, for messages."""
    return BY_NAME[row.option or {"use_liger_kernel": "liger"}.get(row.name, row.name)].said("on")


def _check_ranks_of_own_code(request: SearchRequest) -> None:
    """Raise ``InvalidRequestError`` where the user's own code cannot train on these GPUs with this strategy.

    Called again after the inspection, which tells whether a script trains with ``transformers.Trainer``.
    """
    source = request.workload.source
    given = [*(["--gpus"] if request.others else []), *(["--strategy"] if request.strategies is not None else [])]
    if source is None or not given:
        return
    if source.framework != "trainer":
        wrong = f"--strategy {','.join(request.strategies)}" if request.strategies is not None else "--gpus"
        raise InvalidRequestError(
            f"{wrong}: {source.name} trains in a loop of its own, which is measured on one GPU only",
            f"leave {' and '.join(given)} out; DDP and FSDP of your own code need transformers.Trainer",
        )
    other = [strategy for strategy in request.strategies or () if strategy not in ("ddp", *FULLY_SHARDED)]
    if other:
        use = "use --strategy ddp,fsdp" if request.ranks > 1 else "leave --strategy out"
        raise InvalidRequestError(
            f"--strategy {other[0]}: code of your own is searched with DDP and FSDP only",
            f"{use}, or name the model with --model",
        )


def _check_context_parallel(request: SearchRequest) -> None:
    """Raise an error where this workload does not support context parallelism.

    torch attends over the ranks that share a sample with CUDA's kernels for causal attention, and gives each of them
    two stretches of the sample of equal length (``torch.distributed.tensor.experimental.context_parallel``).
    """
    count, workload = request.context_parallel, request.workload
    if count == 1:
        return
    said, without = f"--context-parallel {count}", "leave --context-parallel out"
    if request.device.kind != "cuda":
        raise DeviceError(f"{said}: {request.device.kind} has no attention over several ranks", without)
    if workload.task != "causal-lm":
        raise InvalidRequestError(f"{said}: ranks share samples of causal-lm, and this is {workload.task}", without)
    other = [strategy for strategy in request.strategies or () if strategy not in FULLY_SHARDED]
    if other:
        raise InvalidRequestError(
            f"{said}: ranks that share samples shard the weights with FSDP, not {other[0]}",
            "use --strategy fsdp-keep,fsdp, or leave --strategy out",
        )
    attentions = [name for name in request.attn_implementations or () if name != "sdpa"]
    if attentions:
        raise InvalidRequestError(f"{said}: ranks share samples with sdpa, not {attentions[0]}", "leave --attn out")
    data, stretches = workload.data, 2 * count
    for option, is_asked in (
        (BY_NAME["liger"].parameter, request.liger != "off"),
        ("--packing", data is not None and data.packing),
        (BY_NAME["padding_free"].parameter, request.padding_free == "on"),
    ):
        if is_asked:
            raise InvalidRequestError(f"{said} does not go with {option}", f"leave {option} out")
    if data is not None and data.padding != "max_length" and (data.pad_to_multiple_of or 1) % stretches:
        raise InvalidRequestError(
            f"{said} divides each sample in {stretches} equal stretches, and those of --dataset differ in length",
            f"add --pad-to-multiple-of {stretches} or --pad-to-max-length",
        )
    if workload.seq_len % stretches:
        lower = workload.seq_len // stretches * stretches
        raise InvalidRequestError(
            f"{said} divides each sample in {stretches} equal stretches, and {workload.seq_len} tokens are not "
            "divisible",
            f"use --seq-len {' or '.join(str(near) for near in (lower, lower + stretches) if near)}",
        )


def _check_strategies(request: SearchRequest) -> None:
    """Raise an error for a strategy that the GPUs, the weights, the optimizer or another option do not allow."""
    strategies = request.asked_strategies
    if strategies is None:
        return
    # ``zero2-offload`` is of use on one GPU as well: it moves the optimizer to the CPU.
    if request.beside and strategies != ("zero2-offload",):
        raise InvalidRequestError(
            f"--strategy {','.join(strategies)} is how several GPUs train together, and --parallel has each trial "
            "train on one",
            "leave one of the two out",
        )
    if request.ranks == 1 and strategies != ("zero2-offload",):
        raise InvalidRequestError(
            f"--strategy {','.join(strategies)} applies to several GPUs, and there is one",
            "add --gpus 2, or leave it out",
        )
    sharded = [strategy for strategy in strategies if strategy != "ddp"]
    if not sharded:
        return
    if "hybrid" in sharded and group_size(request.ranks) is None:
        raise InvalidRequestError(
            f"--strategy hybrid divides the GPUs in equal groups of two or more, and {request.ranks} make none",
            "use fsdp, or 4 GPUs",
        )
    fsdp = [strategy for strategy in strategies if strategy in FSDP]
    if fsdp and request.device.kind == "cpu":
        raise DeviceError(
            f"--strategy {fsdp[0]}: on a CPU accelerate always trains with DDP",
            "use ddp, or zero2 with DeepSpeed",
        )
    if request.workload.quantize is not None:
        bits = request.workload.quantize[0]
        asked, instead = _sharding_of(request, sharded[0])
        if request.ranks == 1:
            raise InvalidRequestError(
                f"{asked} is not searched with weights in {bits} bits, whose adapters have little optimizer state",
                "leave --strategy out, or leave --quantize out",
            )
        raise InvalidRequestError(
            f"{asked}: weights in {bits} bits are not sharded, every rank keeps all of them",
            f"{instead}, or leave --quantize out, so that the weights can be sharded",
        )
    _check_optims_shard(request, sharded[0])
    _check_zero(request, [strategy for strategy in strategies if strategy in ZERO_STAGES])


def _check_zero(request: SearchRequest, asked: Sequence[Strategy]) -> None:
    """Raise an error for a strategy of DeepSpeed that is impossible here."""
    if not asked:
        return
    if "zero2-offload" in asked and request.device.kind == "cpu":
        raise DeviceError(
            "--strategy zero2-offload moves the optimizer to the CPU, and the training is there already",
            "leave it out, or choose a GPU",
        )
    if request.torch_compile in ("on", "layers"):
        raise InvalidRequestError(
            f"--strategy {asked[0]}: DeepSpeed's steps are not searched compiled",
            f"leave {BY_NAME['torch_compile'].parameter} out, or use --strategy ddp",
        )
    # Last, so that nobody installs DeepSpeed for a search that is refused anyway.
    if request.is_at_hand:
        require(DEEPSPEED, f"--strategy {asked[0]}")


# What is known once the model was inspected


def check_machine(request: SearchRequest, facts: Inspection) -> ModelFacts:
    """Return the inspected model. Raises an error where it cannot be built, or where several GPUs lack NCCL.

    That is ``DeviceError`` for NCCL, else ``InvalidRequestError`` or ``UnknownModelError``.
    """
    if facts.lacks_nccl:
        raise DeviceError(
            f"this torch has no NCCL, through which {request.ranks} GPUs exchange gradients",
            "install torch as pytorch.org says for CUDA, or search on one GPU",
        )
    if facts.model is None and facts.model_hint is not None:
        raise InvalidRequestError(str(facts.model_error), facts.model_hint)
    if facts.model is None:
        raise UnknownModelError(
            f"the model {request.workload.model!r} cannot be built: {facts.model_error}",
            "check its config.json against the installed transformers, or name another --task",
        )
    return facts.model


def check_inspected(request: SearchRequest, facts: Inspection, model: ModelFacts) -> None:
    """Raise ``InvalidRequestError`` for requests that this model, this code or the installed transformers rule out."""
    _check_ranks_of_own_code(request)
    _check_settings(request, model.checkpointing_layers)
    _check_sharding(request, model)
    optims = facts.optims or request.optims
    for optim in request.optims:
        if optim not in optims and optim != OWN_OPTIM:
            near = near_misses(optim, sorted(optims), most=3, least_ratio=0.4) or sorted(optims)[:3]
            raise InvalidRequestError(
                f"--optim {optim} is not known to the installed transformers", f"it has {', '.join(near)} …"
            )
    attentions = request.attn_implementations if request.workload.source is None else None
    for attention in attentions or ():
        if attention not in model.attn_implementations:
            raise InvalidRequestError(
                f"--attn {attention} is not supported by {model.class_name}",
                f"it has {', '.join(model.attn_implementations)}",
            )


def _check_sharding(request: SearchRequest, model: ModelFacts) -> None:
    """Raise ``InvalidRequestError`` where this model cannot be sharded as requested."""
    sharded = [strategy for strategy in request.asked_strategies or () if strategy in FSDP]
    if request.context_parallel > 1 and "sdpa" not in model.attn_implementations:
        raise InvalidRequestError(
            f"--context-parallel {request.context_parallel}: {model.class_name} has no sdpa attention, "
            "by which ranks share samples",
            "leave --context-parallel out",
        )
    if not sharded:
        return
    asked, instead = _sharding_of(request, sharded[0])
    if error := model.sharding_error:
        raise InvalidRequestError(f"{asked}: accelerate cannot shard {model.class_name}: {error}", instead)
    if not model.layer_classes:
        raise InvalidRequestError(f"{asked}: {model.class_name} has no class of layers to shard one by one", instead)
    if request.workload.source is not None:
        # Which optimizer the user's own code has is known since its inspection only.
        _check_optims_shard(request, sharded[0], chosen_by=request.workload.source.name)


def _sharding_of(request: SearchRequest, strategy: Strategy) -> tuple[str, str]:
    """Return, for a message, the option that requests sharded weights, and the advice to train without sharding."""
    if request.context_parallel > 1:
        return f"--context-parallel {request.context_parallel}", "leave --context-parallel out"
    return f"--strategy {strategy}", "use --strategy ddp"


def _check_optims_shard(request: SearchRequest, strategy: Strategy, *, chosen_by: str | None = None) -> None:
    """Raise ``InvalidRequestError`` where an optimizer cannot update the weights that a strategy shards.

    ``chosen_by`` names the user's code that chose the optimizers; ``None`` where ``--optim`` named them.
    """
    unfit = next((optim for optim in request.optims if not shards_with(optim)), None)
    if unfit is None:
        return
    if chosen_by is None:
        what, instead = f"--optim {unfit}", f"use --optim {DEFAULT_OPTIM}"
    elif unfit == OWN_OPTIM:
        what, instead = f"the optimizer that {chosen_by} makes itself", "name one in its TrainingArguments (optim)"
    else:
        what, instead = f"the optimizer {unfit} of {chosen_by}", f"use --optim {DEFAULT_OPTIM}"
    asked, without = _sharding_of(request, strategy)
    raise InvalidRequestError(f"{asked}: {what} cannot update sharded weights", f"{without}, or {instead}")
