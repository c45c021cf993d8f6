"""From a request and what a trial process says of the machine to everything a search needs to begin."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from autotune.device import Ceiling, Device, Headroom
from autotune.device.chips import Chip
from autotune.errors import InvalidRequestError, NothingFitsError, UnknownModelError
from autotune.forecast import Forecast, Submitter
from autotune.memory import questions
from autotune.request import SearchRequest, differences
from autotune.space import Space, choose_arms
from autotune.trial import MEASUREMENT_REVISION, Candidate, Document
from autotune.units import GIB, format_bytes, format_count
from autotune.workload import BYTES_PER_ELEMENT


@dataclass(frozen=True)
class Prepared:
    """A search that can begin."""

    request: SearchRequest
    space: Space
    baseline: Candidate
    ceiling: Ceiling
    environment: Document
    """Device, driver and library versions; what a measurement depends on."""
    model: Document
    """Facts about the model: ``parameters``, ``class``, ``attn_implementations`` …"""

    chip: Chip | None = None
    """What of the GPU decides about memory; ``None`` on a CPU, for which nothing is predicted."""

    @property
    def environment_fingerprint(self) -> str:
        """The same for two environments exactly when a measurement in one holds in the other."""
        facts = measured_environment(self.environment)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


_NOT_IN_FINGERPRINT = frozenset({"training_arguments_fields", "device_uuid", "device_label"})

# Optimizers of TrainingArguments that keep two moments in the weights' dtype, as Adam does. Others
# keep less; what they keep is left out, since only what is certain may refuse a request.
_FULL_ADAM = frozenset({"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_apex_fused"})


# Variables that change how fast torch trains or how much memory it takes.
_MEASURED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measured_environment(environment: Document) -> Document:
    """The part of an environment that a measurement depends on."""
    return {key: value for key, value in environment.items() if key not in _NOT_IN_FINGERPRINT}


def prepare(request: SearchRequest, facts: Document) -> Prepared:
    """Combine the request with ``facts`` (see ``autotune.worker.facts.inspect``).

    Raises ``UnknownModelError`` where the model cannot be built, ``NothingFitsError`` where the
    memory limit is below what its weights, gradients and optimizer state alone need.
    """
    if "model_error" in facts:
        raise UnknownModelError(
            f"the model {request.workload.model!r} cannot be built: {facts['model_error']}",
            "check its config.json against the installed transformers, or name another --task",
        )
    model: Document = facts["model"]
    context_bytes = int(facts["context_bytes"])
    _check_training_state_fits(request, model, context_bytes)
    ceiling = Ceiling.on_device(request.device, request.memory_limit_bytes, context_bytes, request.headroom)
    _check_optims(request, facts.get("optims") or request.optims)
    attentions = _attentions(request, model)
    arms = choose_arms(
        request.chosen_precisions,
        request.gradient_checkpointing,
        attentions,
        request.optims,
        model_checkpoints=bool(model["gradient_checkpointing"]),
    )
    space = Space(arms, request.batches)
    default_attention = "sdpa" if "sdpa" in model["attn_implementations"] else "eager"
    return Prepared(
        request,
        space,
        space.baseline(default_attention),
        ceiling,
        _environment(request.device, facts),
        model,
        Chip.from_document(facts["chip"]) if "chip" in facts else None,
    )


def changes_since(prepared: Prepared, request: Document, workload: Document, environment: Document) -> list[str]:
    """What keeps a recorded study from being continued by this search, as ``name: recorded, now asked``."""
    # A study of an earlier autotune says nothing of what was not recorded then.
    told = measured_environment(prepared.environment)
    told = {key: value for key, value in told.items() if key in environment or value is None}
    asked = {
        **prepared.request.workload.document(),
        **prepared.request.document(),
        **told,
        # Nothing that is measured depends on it, and workloads that differ in it alone share one record.
        "weights": workload["weights"],
    }
    recorded = {**workload, **request, **measured_environment(environment)}
    # Through JSON, as the recorded ones: what is equal must look equal.
    return differences(recorded, json.loads(json.dumps(asked)))


# Each prediction takes a core for a few seconds and about 1 GiB of host memory.
_MOST_PARALLEL = 8
# A step in the ladder of a free batch doubles it; no GPU holds more than this many doublings of 8.
_MOST_RUNGS = 12


def forecast_of(prepared: Prepared, submitter: Submitter) -> Forecast | None:
    """Have memory predicted for every candidate of a search on a GPU; ``None`` on a CPU, whose memory is another."""
    if prepared.chip is None:
        return None
    batches, objective = prepared.space.batches, prepared.request.objective
    rungs = sorted(rung for level in batches.levels() for rung in batches.at_level(level)[:_MOST_RUNGS])
    is_free = batches.effective_batch is None
    pairs = [] if is_free and objective == "max-batch" else [(rung, batches.accumulation(rung)) for rung in rungs]
    arms = sorted(prepared.space.arms, key=lambda arm: objective == "max-batch" and not arm.gradient_checkpointing)
    asked = questions(arms, pairs, batches.levels()[0] if is_free else None)
    # A GPU's trial needs a core or two to feed it.
    parallel = min(_MOST_PARALLEL, max(1, (os.cpu_count() or 1) // 2))
    return Forecast(submitter, asked, prepared.chip, prepared.ceiling, parallel=parallel)


def _check_optims(request: SearchRequest, known: Collection[str]) -> None:
    """Raise for an optimizer that the installed transformers has no name for."""
    for optim in request.optims:
        if optim not in known:
            near = difflib.get_close_matches(optim, known, 3, 0.4) or sorted(known)[:3]
            raise InvalidRequestError(
                f"--optim {optim} is nothing that the installed transformers knows", f"it has {', '.join(near)} …"
            )


def _attentions(request: SearchRequest, model: Document) -> tuple[str, ...]:
    known: list[str] = model["attn_implementations"]
    if request.attn_implementations is None:
        return ("sdpa",) if "sdpa" in known else ("eager",)
    for attention in request.attn_implementations:
        if attention not in known:
            raise InvalidRequestError(
                f"--attn {attention} is nothing that {model['class']} knows", f"it has {', '.join(known)}"
            )
    return request.attn_implementations


def training_state_bytes(request: SearchRequest, model: Document) -> int:
    """Bytes that any step of this workload needs at least: weights, gradients, optimizer state."""
    moments = 2 if _FULL_ADAM.issuperset(request.optims) else 0
    elements = int(model["parameters"]) + int(model["trainable_parameters"]) * (1 + moments)
    return elements * BYTES_PER_ELEMENT[request.workload.dtype]


def _least_bytes(state_bytes: int, context_bytes: int, headroom: Headroom) -> int:
    """The smallest memory limit whose line is not below the training state."""
    if headroom.size_bytes is not None:
        return state_bytes + headroom.size_bytes + context_bytes
    return math.ceil(state_bytes / (1 - headroom.fraction)) + context_bytes + 1


def _check_training_state_fits(request: SearchRequest, model: Document, context_bytes: int) -> None:
    device, limit_bytes = request.device, request.memory_limit_bytes
    state_bytes = training_state_bytes(request, model)
    least_bytes = _least_bytes(state_bytes, context_bytes, request.headroom)
    free_bytes = device.memory_total_bytes if device.memory_free_bytes is None else device.memory_free_bytes
    reachable_bytes = free_bytes if limit_bytes is None else min(limit_bytes, free_bytes)
    if reachable_bytes >= least_bytes:
        return
    where = "a memory limit of" if reachable_bytes == limit_bytes else f"what is free on {device.label},"
    beside = "CUDA context and headroom" if context_bytes else "headroom"
    # Rounded up, so that what is asked for is enough.
    needed_gib = f"{math.ceil(least_bytes / GIB * 100) / 100:g}"
    enough = f"--memory-limit {needed_gib}GiB" if least_bytes <= free_bytes else f"a device with {needed_gib} GiB free"
    ways = [f"use {enough} or more", "a smaller model"]
    if request.workload.dtype == "float32":
        ways.append("--dtype bfloat16")
    raise NothingFitsError(
        f"{where} {format_bytes(reachable_bytes)} is too little for {request.workload.model}: the weights, gradients "
        f"and optimizer state of its {format_count(model['parameters'])} parameters alone take "
        f"{format_bytes(state_bytes)}, with {beside} {needed_gib} GiB",
        f"{', '.join(ways[:-1])} or {ways[-1]}",
    )


def _environment(device: Device, facts: Document) -> Document:
    reported: dict[str, Any] = facts["environment"]
    return {
        "device_label": device.label,
        "device_kind": device.kind,
        "device_name": device.name,
        "device_uuid": device.uuid,
        "device_memory_bytes": device.memory_total_bytes,
        "device_capability": list(device.capability) if device.capability else None,
        "driver": device.driver,
        "measurement_revision": MEASUREMENT_REVISION,
        "cpus": _usable_cpus() if device.kind == "cpu" else None,
        "variables": {name: os.environ[name] for name in _MEASURED_VARIABLES if name in os.environ},
        **{key: value for key, value in reported.items() if key != "device_capability"},
    }
