"""Prepare a search: combine the request with the inspected machine and model, and build the search space."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from autotune.core import loop
from autotune.core.candidate import OWN_OPTIM, Candidate, Document, Precision
from autotune.core.chip import Chip
from autotune.core.errors import DeviceError, InvalidRequestError, UnknownModelError, near_misses
from autotune.core.inspection import Inspection, ModelFacts, OwnSettings
from autotune.core.options import CheckpointingChoice
from autotune.core.training_source import kind_of_code
from autotune.devices import Ceiling
from autotune.estimate.calibration import Calibration
from autotune.space.dataloader import usable_cores
from autotune.space.features import FLASH_ATTENTION, goes_together
from autotune.space.space import Batches, Space, choose_arms
from autotune.tuning.dataset import check_own_samples
from autotune.tuning.environment import environment_fingerprint
from autotune.tuning.machine import Machine, ThisMachine
from autotune.tuning.request import SearchRequest
from autotune.tuning.strategies import arms_of_one, arms_of_ranks
from autotune.tuning.training_state import check_training_state_fits, training_state_bytes


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
        request.check_own_code()
        check_own_samples(request, model.samples)
        request = _without_what_is_not_read(request, model)
    if request.workload.source is None:
        # The user's own Trainer may have another optimizer, and quantized weights.
        check_training_state_fits(request, model, facts.context_bytes)
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
