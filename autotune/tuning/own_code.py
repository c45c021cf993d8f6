"""Fit the request of a search to what the user's own code trains with, and to what it lets a trial change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.core.candidate import OWN_OPTIM, Arm, Precision
from autotune.core.code_interface import CodeInterface
from autotune.core.errors import InvalidRequestError, NothingFitsError
from autotune.core.inspection import ModelFacts, OwnSettings
from autotune.core.options import CheckpointingChoice
from autotune.core.units import format_bytes
from autotune.space.levers import BY_NAME, PRIORS
from autotune.space.space import Batches
from autotune.tuning.request import SearchRequest


def fit_to_own_code(request: SearchRequest, model: ModelFacts) -> SearchRequest:
    """Return the request with the own code's settings as defaults, without options that the code ignores.

    Raises ``InvalidRequestError`` where the code cannot be searched as requested.
    """
    request = _adopt_own_settings(request, model)
    # With placeholders, it is not known whether a step may go on with the next epoch.
    if model.interface.kind != "placeholders":
        _check_samples(request, model.samples)
    return _without_ignored_settings(request, model)


def _engine_bytes(request: SearchRequest, model: ModelFacts) -> int | None:
    """Return the bytes that vLLM takes of a GPU in each trial's process; ``None`` where it does not run there.

    vLLM gets a share of the memory that CUDA counts, which leaves out the driver's. TRL runs vLLM in the process that
    trains, so torch's allocator holds vLLM's weights and cache: the allocator's cap and all measured peaks count them.
    """
    share, device = model.interface.engine_share, request.device
    if share is None or device.kind != "cuda":
        return None
    return int(share * (device.memory_total_bytes - (device.memory_reserved_bytes or 0)))


def note_on_engine(request: SearchRequest, model: ModelFacts) -> str | None:
    """Return a note on the memory that vLLM takes beside the training; ``None`` where it does not run there."""
    if (taken_bytes := _engine_bytes(request, model)) is None:
        return None
    return (
        f"vLLM takes {format_bytes(taken_bytes)} of {request.device.label} in the process of each trial "
        f"(vllm_gpu_memory_utilization={model.interface.engine_share:g}): peaks have it in them, also while it sleeps"
    )


def notes_on_lengths(request: SearchRequest, interface: CodeInterface) -> Iterator[str]:
    """Yield notes on how far sample lengths are known, and on levers that this rules out."""
    lengths = interface.lengths
    if lengths is not None and lengths.unknown is not None:
        yield f"the lengths of its samples are not known: {lengths.unknown}"
    elif lengths is not None and (seen := sum(count for _, count in lengths.counts)) != lengths.samples:
        of = "a stream" if lengths.samples is None else f"{lengths.samples:,}"
        yield f"the lengths of its samples are those of {seen:,} that were drawn, of {of}"
    for name in ("length_multiple", "padding_free"):
        why, choice = interface.obstacles.get(name), getattr(request, BY_NAME[name].option or "")
        # A lever that was requested is refused with the reason, elsewhere.
        if why is not None and choice == "auto" and interface.shapes_vary and request.goes_on:
            yield f"not tried: {PRIORS[name].called}; {why}"


def check_engine_fits(request: SearchRequest, model: ModelFacts, context_bytes: int) -> None:
    """Raise ``NothingFitsError`` where vLLM alone takes all memory of a trial.

    vLLM takes its whole share, and does not start where less is free.
    """
    taken_bytes, reachable_bytes = _engine_bytes(request, model), request.reachable_bytes
    if taken_bytes is None or taken_bytes + context_bytes < reachable_bytes:
        return
    source = request.workload.source
    assert source is not None
    is_limited = reachable_bytes == request.memory_limit_bytes
    where = "a memory limit of" if is_limited else f"what is free on {request.device.label},"
    raise NothingFitsError(
        f"{where} {format_bytes(reachable_bytes)} leaves nothing for training beside vLLM, to which {source.name} "
        f"gives {format_bytes(taken_bytes)} of the GPU (vllm_gpu_memory_utilization={model.interface.engine_share:g})",
        "lower vllm_gpu_memory_utilization" + (" or raise --memory-limit" if is_limited else ""),
    )


def _check_samples(request: SearchRequest, samples: int | None) -> None:
    """Raise ``InvalidRequestError`` where the user's dataset, ``samples`` for each rank, is too small for a step."""
    source = request.workload.source
    if source is None or samples is None:
        return
    if request.effective_batch is None:
        needed = batch = request.batch_multiple or 1
        option, largest = "--batch-multiple", samples
    else:
        needed, batch = request.effective_batch // request.world_size, request.effective_batch
        option, largest = "--effective-batch", samples * request.world_size
    if samples < needed:
        raise InvalidRequestError(
            f"the training data of {source.name} has {samples} samples, less than one step of {option} {batch}",
            f"use {option} {largest} or less, or more data",
        )


def _adopt_own_settings(request: SearchRequest, model: ModelFacts) -> SearchRequest:
    """Return the request with the settings of the user's own code, where the user requested no other ones."""
    effective_batch = _effective_batch(request, model)
    optim = model.own.arm.optim if model.own is not None else OWN_OPTIM
    source = request.workload.source
    assert source is not None
    # The request of a resumed study names ``OWN_OPTIM``.
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
            source=replace(source, interface=replace(model.interface, samples=model.samples)),
        ),
        effective_batch=effective_batch,
        optims=request.optims or (optim,),
    )


def _effective_batch(request: SearchRequest, model: ModelFacts) -> int | None:
    """Return the requested effective batch, or else the code's own; ``None`` where the batch is free.

    Raises ``InvalidRequestError`` where the code cannot train at the requested one, or its own is not known.
    """
    asked, own, source = request.effective_batch, model.own_candidate, request.workload.source
    assert source is not None
    fixed = model.interface.fixed
    total = fixed.effective_batch
    if total is not None and asked not in (None, total):
        raise InvalidRequestError(
            f"--effective-batch {asked}: {source.name} makes its accumulation of a total of {total} samples",
            "put {effective_batch} or {effective_tokens} where its command line says that total, or use "
            f"--effective-batch {total}",
        )
    count = model.interface.samples_a_prompt
    if asked is not None and asked % count:
        near = [str(batch) for batch in (asked // count * count, (asked // count + 1) * count) if batch]
        raise InvalidRequestError(
            f"--effective-batch {asked}: {source.name} generates {count} completions of each prompt, of which a step "
            "has all",
            f"use --effective-batch {' or '.join(near)}",
        )
    if asked is not None or request.objective != "throughput":
        return asked
    if total is not None:
        return total
    if fixed.accumulation is not None and "batch" in model.interface.searched:
        return None
    if own is None and model.interface.kind == "placeholders":
        raise InvalidRequestError(
            f"it is not known which effective batch {source.name} trains at by itself",
            "give --effective-batch, the samples of an optimizer step",
        )
    return own.samples_per_step * request.world_size if own is not None else None


def _without_ignored_settings(request: SearchRequest, model: ModelFacts) -> SearchRequest:
    """Return the request without settings that the user's code would ignore.

    Raises ``InvalidRequestError`` where such a setting was requested, or nothing would be left to search.
    """
    source, searched = request.workload.source, model.interface.searched
    assert source is not None
    if not searched:
        raise InvalidRequestError(
            f"{source.name} uses nothing of its config, so that nothing can be searched",
            "have it make its batches of config.per_device_batch_size, or read config.precision",
        )
    named = model.interface.precisions
    if named and "precision" in searched:
        return _with_named_precisions(request, named)
    if "precision" not in searched:
        own: Precision = model.own.arm.precision if model.own is not None else "fp32"
        if request.precisions not in (None, (own,)):
            raise InvalidRequestError(
                f"--precision {','.join(request.precisions or ())} does not apply to {source.name}, which decides it",
                "leave --precision out",
            )
        return replace(request, precisions=(own,))
    if source.framework in ("loop", "placeholders") and request.precisions is None:
        # A loop may know no precision of that name.
        return replace(request, precisions=tuple(p for p in request.chosen_precisions if p != "tf32"))
    return request


def _with_named_precisions(request: SearchRequest, named: tuple[Precision, ...]) -> SearchRequest:
    """Return the request with the precisions for which a placeholder in the script's command says the script's word."""
    precisions = request.precisions or named
    if unnamed := [name for name in precisions if name not in named]:
        raise InvalidRequestError(
            f"--precision {unnamed[0]}: the placeholder does not say what the script calls it",
            f"name it there: {{precision:{unnamed[0]}=…}}",
        )
    usable = tuple(name for name in precisions if request.precisions or name in request.chosen_precisions)
    return replace(request, precisions=usable or precisions)


def checkpointing_of(request: SearchRequest, model: ModelFacts) -> CheckpointingChoice:
    """Return the requested choice of gradient checkpointing; ``on`` where the user's own code always turns it on."""
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


def batches_of(request: SearchRequest, model: ModelFacts) -> Batches:
    """Return the batches to search; for the user's own code, those that it can train and that its dataset fills."""
    if request.workload.source is None:
        return request.batches
    return replace(
        request.batches,
        samples=model.samples,
        only=_only_batch(request, model),
        own_accumulation=model.interface.fixed.accumulation or 1,
    )


def _only_batch(request: SearchRequest, model: ModelFacts) -> int | None:
    """Return the only per-device batch that the user's code supports; ``None`` where it supports any.

    Raises ``InvalidRequestError`` where the requested effective batch is impossible.
    """
    source, searched = request.workload.source, model.interface.searched
    assert source is not None
    own, fixed = model.own or OwnSettings(Arm()), model.interface.fixed
    batch = own.per_device_train_batch_size if fixed.batch is None else fixed.batch
    accumulation = own.gradient_accumulation_steps if fixed.accumulation is None else fixed.accumulation
    effective_batch = request.effective_batch
    if "batch" in searched and ("accumulation" in searched or effective_batch is None):
        return None
    samples = None if effective_batch is None else effective_batch // request.world_size
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
    only = int(samples // accumulation)
    if model.samples is not None and only > model.samples:
        most = model.samples * accumulation * request.world_size
        raise InvalidRequestError(
            f"the training data of {source.name} has {model.samples} samples, which make no batch of {only}",
            f"use --effective-batch {most} or less, more data, or let it accumulate (see docs/how-to/own-script.md)",
        )
    return only
