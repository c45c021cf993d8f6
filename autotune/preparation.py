"""From a request and what a trial process says of the machine to everything a search needs to begin."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from autotune.device import Ceiling, Device
from autotune.errors import InvalidRequestError, NothingFitsError, UnknownModelError
from autotune.request import SearchRequest
from autotune.space import Space, choose_arms
from autotune.trial import Candidate, Document
from autotune.units import format_bytes, format_count
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

    @property
    def environment_fingerprint(self) -> str:
        """The same for two environments exactly when a measurement in one holds in the other."""
        facts = {key: value for key, value in self.environment.items() if key not in _NOT_IN_FINGERPRINT}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


_NOT_IN_FINGERPRINT = frozenset({"training_arguments_fields", "device_uuid", "device_label"})

# Bytes of optimizer state per byte of weights: Adam keeps two moments in the weights' dtype.
# Others keep less; what they keep is left out, since only what is certain may refuse a request.
_ADAM_STATES = 2


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
    ceiling = Ceiling.on_device(
        request.device, request.memory_limit_bytes, int(facts["context_bytes"]), request.headroom
    )
    _check_training_state_fits(request, model, ceiling)
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
        request, space, space.baseline(default_attention), ceiling, _environment(request.device, facts), model
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
    adam = all(optim.startswith("adamw_torch") or optim == "adamw_apex_fused" for optim in request.optims)
    copies = 2 + (_ADAM_STATES if adam else 0)
    return int(model["parameters"]) * BYTES_PER_ELEMENT[request.workload.dtype] * copies


def _check_training_state_fits(request: SearchRequest, model: Document, ceiling: Ceiling) -> None:
    needed = training_state_bytes(request, model)
    if needed <= ceiling.line_bytes:
        return
    limit = needed / (1 - ceiling.headroom.fraction) + ceiling.context_bytes + (ceiling.headroom.size_bytes or 0)
    whole_gib = math.ceil(limit / 2**30 * 10) / 10
    raise NothingFitsError(
        f"{request.workload.model} has {format_count(model['parameters'])} parameters: weights, gradients and "
        f"optimizer state alone take {format_bytes(needed)}, more than the {format_bytes(ceiling.line_bytes)} "
        f"that a trial may reserve on {request.device.label}",
        f"it takes a limit above {whole_gib:g} GiB, a smaller model, or --dtype bfloat16"
        if request.workload.dtype == "float32"
        else f"it takes a limit above {whole_gib:g} GiB or a smaller model",
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
        **{key: value for key, value in reported.items() if key != "device_capability"},
    }
