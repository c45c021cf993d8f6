"""The request of a recorded study, so that it can be gone on with by its name alone."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from autotune.core.candidate import PRECISIONS, Document
from autotune.core.errors import DeviceError, InvalidRequestError, StorageError
from autotune.core.masking import masked_options
from autotune.core.training_source import TrainingSource
from autotune.core.workload import DTYPES, TASKS, Workload
from autotune.devices import Device, Headroom, find_device, list_devices
from autotune.models.dataset_files import check_unchanged
from autotune.space.features import LEVERS, LeverChoice
from autotune.space.space import CheckpointingChoice
from autotune.store import Store
from autotune.tuning.policy import Objective, SamplerName
from autotune.tuning.request import SearchRequest


@dataclasses.dataclass(frozen=True)
class Budget:
    """What may be spent when a study goes on; ``None`` leaves it as it was recorded."""

    trials: int | None = None
    time_budget_seconds: float | None = None
    trial_timeout_seconds: float | None = None


def recorded_request(
    store: Store, study: str, device: str | None = None, budget: Budget | None = None
) -> SearchRequest:
    """The request that continues the study of this name on the device that it ran on, or on ``device``.

    Raises ``UnknownStudyError``, ``DeviceError`` where there is no such device here, ``StorageError`` for a record
    that makes no request, and ``InvalidRequestError`` where the user's code or data is gone or has changed.
    """
    record = store.existing_study(study)
    try:
        environment = store.environment(record.environment_id)
        found = find_device(device) if device is not None else _device_of(environment, study)
        workload = workload_from_document(store.workload_of(record))
        request = request_from_document(record.request, workload, found, study)
    except (ValueError, InvalidRequestError) as error:
        raise StorageError(
            f"the request of the study {study!r} cannot be read: {error}",
            "repeat the options of the search with autotune search and the same --study",
        ) from error
    if workload.source is not None:
        _check_has_its_secrets(workload.source, study)
        today = dataclasses.replace(workload, source=workload.source.as_it_is_now())
        request = dataclasses.replace(request, workload=today)
    if workload.data is not None:
        check_unchanged(workload.data)
    spent = {name: value for name, value in dataclasses.asdict(budget or Budget()).items() if value is not None}
    return dataclasses.replace(request, **spent)


def _check_has_its_secrets(source: TrainingSource, study: str) -> None:
    """Raise ``InvalidRequestError`` where values of the script's options were not recorded."""
    masked = masked_options(source.argv)
    if masked:
        raise InvalidRequestError(
            f"the study {study!r} was searched with {', '.join(masked)} for {source.name}, whose value is not recorded",
            f"repeat its command with the value and --study {study}: it goes on from what is recorded",
        )


def _device_of(environment: Document, study: str) -> Device:
    """The very device that the study ran on, else another of its name."""
    devices = list_devices()
    uuid, name = environment.get("device_uuid"), environment.get("device_name")
    like = [device for device in devices if device.name == name and device.kind == environment.get("device_kind")]
    for device in [*(device for device in like if device.uuid == uuid), *like]:
        return device
    raise DeviceError(
        f"the study {study!r} was searched on {name} ({uuid}), which is not here",
        "name a device of the same kind with --device, or search anew under another --study",
    )


def workload_from_document(document: Document) -> Workload:
    """``Workload.from_document`` for a document that may be anything; ``ValueError`` where it is no workload."""
    try:
        workload = Workload.from_document(document)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(str(error)) from error
    is_own = workload.source is not None
    if not isinstance(workload.config, dict) or not (is_own or isinstance(workload.config.get("model_type"), str)):
        raise ValueError("its workload has no model_type")
    _check("task", workload.task, one_of=("own",) if is_own else TASKS)
    _check("dtype", workload.dtype, one_of=DTYPES)
    _check("seq_len", workload.seq_len, int, least=0 if is_own else 1)
    _check("padding", workload.padding, int, float, least=0)
    return workload


# Names in the document and in the request, where they differ.
_RENAMED = {"precision": "precisions", "attn_implementation": "attn_implementations", "optim": "optims"}
# What the rest of the document says again.
_ELSEWHERE = frozenset({"model", "headroom_fraction", "headroom_bytes", "data_at"})


def request_from_document(document: Document, workload: Workload, device: Device, study: str) -> SearchRequest:
    """The inverse of ``SearchRequest.document``; ``ValueError`` on anything malformed.

    ``InvalidRequestError`` for values that no request can have.
    """
    if not isinstance(document, dict):
        raise ValueError("it is no document")
    known = {field.name for field in dataclasses.fields(SearchRequest)}
    options = {_RENAMED.get(key, key): value for key, value in document.items() if key not in _ELSEWHERE}
    unknown = sorted(name for name, value in options.items() if name not in known and value not in (None, False))
    if unknown:
        raise ValueError(f"it has options that this autotune does not know ({', '.join(unknown)})")
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    _check_options(options)
    headroom = Headroom(**_headroom(document))
    for name in ("workload", "device", "study", "headroom"):
        options.pop(name, None)
    return SearchRequest(
        workload=workload,
        device=device,
        headroom=headroom,
        study=study,
        **{name: value for name, value in options.items() if name in known},
    )


def _headroom(document: Document) -> dict[str, Any]:
    fraction, size = document.get("headroom_fraction", Headroom().fraction), document.get("headroom_bytes")
    _check("headroom_fraction", fraction, int, float, least=0)
    _check("headroom_bytes", size, int, type(None))
    return {"fraction": fraction, "size_bytes": size}


def _check_options(options: Document) -> None:
    """Raise ``ValueError`` for a value of a type or range that no command line can give."""
    for name in ("effective_batch", "batch_multiple", "memory_limit_bytes", "trials"):
        _check(name, options.get(name), int, type(None), least=1)
    if "tolerance" in options:
        _check("tolerance", options["tolerance"], int, float, least=0)
    for name in ("time_budget_seconds", "trial_timeout_seconds"):
        if name in options:
            _check(name, options[name], int, float, type(None), least=0)
    for name, least in (("world_size", 1), ("seed", 0)):
        if name in options:
            _check(name, options[name], int, least=least)
    for name in ("measure_baseline", "fresh"):
        if name in options and not isinstance(options[name], bool):
            raise ValueError(f"{name} is neither true nor false")
    for name, choices in (
        *((lever, get_args(LeverChoice)) for lever in LEVERS),
        ("objective", get_args(Objective)),
        ("sampler", get_args(SamplerName)),
        ("gradient_checkpointing", get_args(CheckpointingChoice)),
    ):
        if name in options:
            _check(name, options[name], one_of=choices)
    for name in ("precisions", "attn_implementations", "optims"):
        words = options.get(name)
        if words is None and name != "optims":
            continue
        if name in options and not (words and isinstance(words, tuple) and all(isinstance(w, str) for w in words)):
            raise ValueError(f"{name} is {words!r:.80}, no list of words")
    for precision in options.get("precisions") or ():
        _check("precision", precision, one_of=PRECISIONS)


def _check(name: str, value: Any, *types: type, least: float | None = None, one_of: tuple[str, ...] = ()) -> None:
    is_right = value in one_of if one_of and isinstance(value, str) else isinstance(value, types) if types else False
    # True is an int to Python, and nan is smaller than nothing.
    if isinstance(value, bool) or not is_right or (least is not None and value is not None and not value >= least):
        raise ValueError(f"{name} is {value!r:.80}")
