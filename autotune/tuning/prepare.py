"""Prepare a search: combine the request with the inspected machine and model, and build the search space."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from autotune.core import loop
from autotune.core.candidate import OWN_OPTIM, Candidate, Document, Precision
from autotune.core.chip import Chip
from autotune.core.errors import DeviceError, InvalidRequestError, NothingFitsError, UnknownModelError, near_misses
from autotune.core.inspection import Inspection, ModelFacts, OwnSettings
from autotune.core.options import CheckpointingChoice
from autotune.core.prediction import ArmsToTrace
from autotune.core.training_source import kind_of_code
from autotune.core.units import GIB, MIB, format_bytes, format_count
from autotune.core.workload import BYTES_PER_ELEMENT
from autotune.devices import Ceiling, Headroom
from autotune.devices.host import host_memory
from autotune.estimate.calibration import Calibration
from autotune.estimate.memory import questions
from autotune.estimate.memory_jobs import Forecast, Kept, OwnTraces, Submitter, Target
from autotune.models.hub_revision import commit_of
from autotune.space.dataloader import usable_cores
from autotune.space.features import FLASH_ATTENTION, goes_together, is_predictable
from autotune.space.space import Batches, Space, choose_arms
from autotune.tuning.dataset import check_own_samples
from autotune.tuning.environment import (
    comparable_environment,
    environment_fingerprint,
    measured_environment,
    records_host,
)
from autotune.tuning.machine import Machine, ThisMachine
from autotune.tuning.request import SearchRequest, differences
from autotune.tuning.strategies import arms_of_one, arms_of_ranks, least_share, may_offload


@dataclass(frozen=True)
class Prepared:
    """A search that is ready to start."""

    request: SearchRequest
    space: Space
    baseline: Candidate
    ceiling: Ceiling
    environment: Document
    """Device, driver and library versions, on which a measurement depends."""
    model: ModelFacts

    chip: Chip | None = None
    """The GPU's properties that determine memory; ``None`` on a CPU, for which nothing is predicted."""

    calibration: Calibration | None = None
    """What the machine was measured to do; ``None`` on a CPU, and where that failed."""

    @property
    def usable_cores(self) -> int:
        """The number of cores that a trial may run on, where it runs."""
        cores: int | None = self.environment.get("host", {}).get("usable_cores")
        return cores or usable_cores()

    @property
    def environment_fingerprint(self) -> str:
        """A hash that is equal for two environments exactly when a measurement in one holds in the other."""
        return environment_fingerprint(self.environment)


# Optimizers of TrainingArguments that keep two moments in the weights' dtype, as Adam does. The state of others, which
# is smaller, is not counted, since a request may only be refused for what is certain.
_FULL_ADAM = frozenset({"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_apex_fused"})


# Of each trained parameter in the host's memory with zero2-offload: the float32 weight and gradient, and two moments
# (DeepSpeedZeroOptimizer with cpu_offload, in deepspeed/runtime/zero/stage_1_and_2.py).
_HOST_BYTES = 16


def _measurement_revision(request: SearchRequest) -> int:
    """Return a number that grows with every change of the worker that changes a candidate's speed or peak.

    2: on a GPU, steps of padded lengths that were new to it are no longer timed.
    3: on a GPU, ``tf32`` is left at its default but for the precision of that name.
    4: a step's time is the mean over the measured steps rather than their median. On a CPU this is 2.
    """
    return 4 if request.device.kind == "cuda" else 2


def prepare(request: SearchRequest, facts: Inspection, machine: Machine | None = None) -> Prepared:
    """Combine the request with what an inspection found out on the machine, by default this one.

    Raises ``UnknownModelError`` where the model cannot be built, ``NothingFitsError`` where the
    memory limit is below what its weights, gradients and optimizer state alone need.
    """
    if facts.lacks_nccl:
        raise DeviceError(
            f"this torch has no NCCL, through which {request.ranks} GPUs exchange gradients",
            "install torch as pytorch.org says for CUDA, or search on one GPU",
        )
    model = facts.model
    if model is None:
        raise UnknownModelError(
            f"the model {request.workload.model!r} cannot be built: {facts.model_error}",
            "check its config.json against the installed transformers, or name another --task",
        )
    if request.workload.source is not None:
        request = adopt_own_settings(request, model)
        _check_several_ranks(request)
        check_own_samples(request, model.samples)
        request = _without_what_is_not_read(request, model)
    if request.workload.source is None:
        # The user's own Trainer may have another optimizer, and quantized weights.
        _check_training_state_fits(request, model, facts.context_bytes)
    ceiling = Ceiling(request.memory_limit_bytes, request.least_free_bytes, facts.context_bytes, request.headroom)
    _check_optims(request, facts.optims or request.optims)
    attentions = _attentions(request, model)
    arms = choose_arms(
        request.chosen_precisions,
        _checkpointing(request, model),
        attentions,
        request.optims,
        model_checkpoints=model.gradient_checkpointing,
        expandable_segments="off" if request.device.kind == "cpu" else request.expandable_segments,
        # Compiling does not change the largest batch that fits.
        torch_compile="off" if request.objective == "max-batch" else request.torch_compile,
        liger=request.liger,
        pinned=request.pins == "on",
    )
    arms = tuple(arm for arm in arms if goes_together(arm, request.workload.dtype))
    if not arms:
        raise InvalidRequestError(
            f"--attn {FLASH_ATTENTION} computes in 16 bits only", "allow --precision bf16 or fp16, or --attn sdpa"
        )
    if request.ranks > 1:
        arms = arms_of_ranks(arms, request, model, training_state_bytes(request, model))
    else:
        arms = arms_of_one(arms, request, training_state_bytes(request, model))
    space = Space(arms, _batches(request, model), _own_baseline(model), pins_winner=request.pins == "auto")
    default_attention = "sdpa" if "sdpa" in model.attn_implementations else "eager"
    baseline = space.baseline(default_attention)
    if request.ranks > 1:
        baseline = replace(baseline, arm=replace(baseline.arm, strategy="ddp", ranks=request.ranks))
    return Prepared(
        request,
        space,
        baseline,
        ceiling,
        (machine or ThisMachine()).environment(request, arms, facts.software, _measurement_revision(request)),
        model,
        facts.chip,
        facts.calibration,
    )


def _check_several_ranks(request: SearchRequest) -> None:
    """Raise ``InvalidRequestError`` where the user's own code cannot be measured on the ranks that were asked for."""
    source = request.workload.source
    if request.ranks > 1 and source is not None and kind_of_code(source.interface) != "trainer":
        raise InvalidRequestError(
            f"--gpus: {source.name} trains in a loop of its own, which is measured on one GPU only",
            "leave --gpus out; on several GPUs a transformers.Trainer is measured",
        )


def adopt_own_settings(request: SearchRequest, model: ModelFacts) -> SearchRequest:
    """Return the request with the settings that the user's own code was seen to use, where none were asked for."""
    own = model.own.candidate() if model.own is not None else None
    effective_batch = request.effective_batch
    if effective_batch is None and request.objective == "throughput" and own is not None:
        effective_batch = own.samples_per_step * request.world_size
    optim = model.own.optim if model.own is not None else OWN_OPTIM
    source = request.workload.source
    assert source is not None
    # A study that is resumed has recorded that name.
    if {*request.optims} - {OWN_OPTIM} and optim == OWN_OPTIM:
        raise InvalidRequestError(
            f"--optim {','.join(request.optims)} does not apply to {source.name}, which makes its optimizer itself",
            "leave --optim out",
        )
    return replace(
        request,
        workload=replace(
            request.workload,
            config=model.config,
            dtype=model.dtype,
            source=replace(source, interface=model.interface),
        ),
        effective_batch=effective_batch,
        optims=request.optims or (optim,),
    )


def _searched(model: ModelFacts) -> frozenset[str]:
    """Return what of a candidate the user's code takes: a Trainer everything, other code what it was seen to use."""
    return frozenset(model.interface.get("searched", loop.FIELDS))


def _without_what_is_not_read(request: SearchRequest, model: ModelFacts) -> SearchRequest:
    """Return the request without what the user's code would ignore.

    Raises ``InvalidRequestError`` where that was asked for, or nothing would be left to search.
    """
    source, searched = request.workload.source, _searched(model)
    assert source is not None
    if not searched:
        raise InvalidRequestError(
            f"{source.name} uses nothing of its config, so that nothing can be searched",
            "have it make its batches of config.per_device_batch_size, or read config.precision",
        )
    if "precision" not in searched:
        own: Precision = model.own.precision if model.own is not None else "fp32"
        if request.precisions not in (None, (own,)):
            raise InvalidRequestError(
                f"--precision {','.join(request.precisions or ())} does not apply to {source.name}, which decides it",
                "leave --precision out",
            )
        return replace(request, precisions=(own,))
    if kind_of_code(source.interface) == "loop" and request.precisions is None:
        # A loop may know no precision of that name.
        return replace(request, precisions=tuple(p for p in request.chosen_precisions if p != "tf32"))
    return request


def _checkpointing(request: SearchRequest, model: ModelFacts) -> CheckpointingChoice:
    """Return what to search of checkpointing; always on where the user's own code turns it on itself."""
    source = request.workload.source
    if source is None or not model.always_checkpoints:
        return request.gradient_checkpointing
    if request.gradient_checkpointing == "off":
        raise InvalidRequestError(
            f"--gradient-checkpointing off: the model of {source.name} checkpoints by itself, whatever its "
            "TrainingArguments say",
            "have it call gradient_checkpointing_enable only where they say so, or leave the option out",
        )
    return "on"


def _batches(request: SearchRequest, model: ModelFacts) -> Batches:
    """Return the batches of the space; none is larger than the dataset."""
    if request.workload.source is None:
        return request.batches
    return replace(request.batches, samples=model.samples, only=_only_batch(request, model))


def _only_batch(request: SearchRequest, model: ModelFacts) -> int | None:
    """Return the one per-device batch that the user's code can be run with; ``None`` where it takes any.

    Raises ``InvalidRequestError`` where the effective batch that was asked for cannot be had.
    """
    source, searched = request.workload.source, _searched(model)
    assert source is not None
    own = model.own or OwnSettings(OWN_OPTIM)
    batch, accumulation = own.per_device_train_batch_size, own.gradient_accumulation_steps
    asked = request.effective_batch
    if {"batch", "accumulation"} <= searched or (asked is None and "batch" in searched):
        return None
    samples = None if asked is None else asked // request.world_size
    if "batch" not in searched:
        if batch is None or (samples is not None and samples % batch):
            raise InvalidRequestError(
                f"{source.name} does not take another per-device batch"
                + (f" than {batch}, which does not divide {samples}" if batch else ""),
                f"use a multiple of {batch}" if batch else "have it make its batches of config.per_device_batch_size",
            )
        if samples not in (None, batch * accumulation) and "accumulation" not in searched:
            raise InvalidRequestError(
                f"{source.name} trains at {batch} × {accumulation} and takes no other batch",
                f"use --effective-batch {batch * accumulation * request.world_size}",
            )
        return int(batch)
    assert samples is not None
    if samples % accumulation:
        raise InvalidRequestError(
            f"{source.name} accumulates {accumulation} steps by itself, which does not divide {samples} samples",
            f"use --effective-batch {max(1, samples // accumulation) * accumulation * request.world_size}",
        )
    # Accumulation follows from the batch, so one batch is left.
    return int(samples // accumulation)


def _own_baseline(model: ModelFacts) -> Candidate | None:
    return model.own.candidate() if model.own is not None else None


def changes_since(prepared: Prepared, request: Document, workload: Document, environment: Document) -> list[str]:
    """Return what keeps this search from continuing a recorded study, as ``name: recorded, now asked``."""
    asked = {
        **prepared.request.workload.recorded_document(),
        **prepared.request.document(),
        **comparable_environment(prepared.environment, environment),
    }
    # Measurements do not depend on the values of weights, and workloads that differ only in those share one record.
    # With quantized weights, loading decides which layers are quantized; that is recorded as long as the host is.
    tells_apart = workload.get("quantize") is not None and records_host(environment)
    if not tells_apart or bool(asked["weights"]) == bool(workload["weights"]):
        asked["weights"] = workload["weights"]
    asked["data"] = _as_far_as_known(asked["data"], workload.get("data"))
    workload = {**workload, "source": _as_asked(workload.get("source"))}
    asked["source"] = _as_asked(asked["source"])
    recorded = {**workload, **request, **measured_environment(environment)}
    # Converted to JSON and back, as the recorded ones were, so that equal values compare equal.
    return [*_revision_change(recorded, asked, prepared), *_in_short(recorded, json.loads(json.dumps(asked)))]


def _revision_change(recorded: Document, asked: Document, prepared: Prepared) -> list[str]:
    """Take the measurement revision out of both documents; return the difference in a sentence."""
    then, today = recorded.pop("measurement_revision", 1), prepared.environment["measurement_revision"]
    asked.pop("measurement_revision", None)
    if then == today:
        return []
    return [f"measured by another version of autotune, whose trials differ: measurement revision {then}, now {today}"]


def _as_asked(source: Document | None) -> Document | None:
    """Return a source without what its inspection has shown, which an earlier autotune did not record."""
    return {name: value for name, value in source.items() if name != "interface"} if source else source


def _as_far_as_known(data: Document | None, recorded: Document | None) -> Document | None:
    """Return the data with the recorded content where its commit on the hub was, or is, not known."""
    if not data or not recorded or data["kind"] != "hub" or data["source"] != recorded["source"]:
        return data
    is_known = commit_of(data["content"]) and commit_of(recorded["content"])
    return data if is_known else {**data, "content": recorded["content"]}


# Fields about the content of files, rather than how they are used.
_CONTENT = frozenset({"digest", "content", "facts", "tokenizer_content"})


def _in_short(recorded: Document, asked: Document) -> list[str]:
    """Return the differences; those of the user's data and code by name only."""
    named = []
    for name, key in (("data", "source"), ("source", "file")):
        before, now = recorded.get(name), asked.get(name)
        # A tokenizer is identified by its content, wherever it is.
        if before == now or (before and now and {**before, "tokenizer": None} == {**now, "tokenizer": None}):
            continue
        if before and now and before[key] == now[key]:
            used = [{k: v for k, v in document.items() if k not in _CONTENT} for document in (before, now)]
            how = [f"{name}.{difference}" for difference in differences(*used)]
            named += how or [f"{now[key]} has changed since"]
        else:
            named.append(f"{name}: {before[key] if before else 'none'}, now {now[key] if now else 'none'}")
    # The labels in a model's config come from the dataset.
    own = {"data", "data_at", "source", *(["config"] if named else [])}
    told = ({key: value for key, value in document.items() if key not in own} for document in (recorded, asked))
    return named + differences(*told)


# A prediction takes a core for a few seconds, and about 1 GiB of host memory.
_MOST_PARALLEL = 8
# Of several ranks there are 20 questions for a model with checkpointing, of 2 to 10 s of a core each (Llama-3.2-1B).
_MOST_PARALLEL_OF_RANKS = 16
_PREDICTION_BYTES = GIB
# Trials of image models that were timed beside predictions were wrong by 10 % and more, so a search waits for
# predictions there, in total no longer than this.
_PATIENCE_SECONDS = 20.0
# The same for several ranks, whose strategies make more and slower predictions. With 20 s a search of Llama-3.2-1B on
# two H200 tried candidates before they were predicted: 12 of 17 ran out of memory, and it took 96 s.
_RANKS_PATIENCE_SECONDS = 60.0
# Free batches double from 8; no GPU has memory for more doublings than this.
_MOST_RUNGS = 12


def arms_to_trace(request: SearchRequest) -> ArmsToTrace:
    """Return the arms of the user's own code whose memory is to be traced."""
    choices = {"on": (True,), "off": (False,)}.get(request.gradient_checkpointing, (False, True))
    return ArmsToTrace(request.chosen_precisions, choices, tuple(name for name in request.optims if name != OWN_OPTIM))


def most_predictions(cores: int, free_bytes: int | None = None, ranks: int = 1) -> int:
    """Return how many predictions may run at once on ``cores`` cores and the host's free memory, read if not given."""
    free_bytes = host_memory().free_bytes if free_bytes is None else free_bytes
    most = _MOST_PARALLEL if ranks == 1 else _MOST_PARALLEL_OF_RANKS
    return max(1, min(most, cores, most if free_bytes is None else free_bytes // _PREDICTION_BYTES))


def forecast_of(
    prepared: Prepared,
    submitter: Submitter,
    kept: Kept | None = None,
    *,
    cores: int | None = None,
    free_host_bytes: int | None = None,
    patience_seconds: float | None = None,
) -> Forecast | None:
    """Return a forecast for every candidate of a search on a GPU, without those already stored in ``kept``.

    At most half of the ``cores`` predict at once, by default those of the trials' machine, and no more than fit into
    the free memory of its host, by default this one's. ``None`` on a CPU, for
    which nothing is predicted. Of the user's own code the arms are predicted whose steps its inspection has traced.
    """
    is_own = prepared.request.workload.source is not None
    if prepared.chip is None or (is_own and prepared.request.ranks > 1):
        # What the user's own code allocates was traced on one rank.
        return None
    traces = None
    if prepared.request.workload.source is not None:
        traces = OwnTraces(submitter, prepared.model.memory)
        # What the code would be next time is not known without running it.
        submitter, kept = traces, None
    batches, objective = prepared.space.batches, prepared.request.objective
    rungs = sorted(rung for level in batches.levels() for rung in batches.at_level(level)[:_MOST_RUNGS])
    is_free = batches.effective_batch is None
    pairs = [] if is_free and objective == "max-batch" else [(rung, batches.accumulation(rung)) for rung in rungs]
    known = [arm for arm in prepared.space.arms if is_predictable(arm, prepared.request.workload)]
    if traces is not None:
        known = [arm for arm in known if traces.has(arm)]
    ranks = prepared.request.ranks
    # Of several ranks the precisions of 16 bits come first: the others are slower, and tried where those fail.
    arms = sorted(
        known,
        key=lambda arm: (
            objective == "max-batch" and not arm.gradient_checkpointing,
            ranks > 1 and arm.precision not in ("bf16", "fp16"),
        ),
    )
    asked = questions(arms, pairs, batches.levels()[0] if is_free else None)
    # A trial on a GPU needs one or two cores to feed it.
    parallel = most_predictions((cores or prepared.usable_cores) // 2, free_host_bytes, ranks)
    target = Target(prepared.chip, prepared.ceiling, asked)
    if patience_seconds is None:
        patience_seconds = _PATIENCE_SECONDS if ranks == 1 else _RANKS_PATIENCE_SECONDS
    return Forecast(
        submitter, [target], parallel=parallel, kept=kept, patience_seconds=patience_seconds, asks_ahead=ranks > 1
    )


def _check_optims(request: SearchRequest, known: Collection[str]) -> None:
    """Raise ``InvalidRequestError`` for an optimizer that the installed transformers does not have."""
    for optim in request.optims:
        if optim not in known and optim != OWN_OPTIM:
            near = near_misses(optim, sorted(known), most=3, least_ratio=0.4) or sorted(known)[:3]
            raise InvalidRequestError(
                f"--optim {optim} is not known to the installed transformers", f"it has {', '.join(near)} …"
            )


def _attentions(request: SearchRequest, model: ModelFacts) -> tuple[str, ...]:
    known = model.attn_implementations
    if request.workload.source is not None:
        return known
    if request.attn_implementations is None:
        return ("sdpa",) if "sdpa" in known else ("eager",)
    for attention in request.attn_implementations:
        if attention not in known:
            raise InvalidRequestError(
                f"--attn {attention} is not supported by {model.class_name}", f"it has {', '.join(known)}"
            )
    return request.attn_implementations


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


def _check_training_state_fits(request: SearchRequest, model: ModelFacts, context_bytes: int) -> None:
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
