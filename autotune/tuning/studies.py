"""Open a study, new or recorded; restore the request of a recorded one; explain a search that found nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import (
    AutotuneError,
    DeviceError,
    InvalidRequestError,
    NoResultError,
    NothingFitsError,
    StorageError,
)
from autotune.core.masking import masked_options
from autotune.core.outcome import Failed, source_of
from autotune.core.stop import Stop, StopReason
from autotune.core.training_source import TrainingSource
from autotune.core.units import format_bytes, plural
from autotune.core.workload import Workload
from autotune.devices import Ceiling, Device, devices_of_ranks, find_device, list_devices
from autotune.estimate.history import History, Tried
from autotune.models.dataset_files import check_unchanged
from autotune.store import Store, StudyRecord, TrialRecord
from autotune.tuning.changes import changes_since
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest, request_from_document


@dataclass(frozen=True)
class Opened:
    """A study to search in, with what is recorded of it."""

    study: StudyRecord
    prepared: Prepared
    """The ceiling that the study's verdicts are relative to."""
    trials: tuple[TrialRecord, ...] = ()
    """The trials recorded so far, in order."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


def open_study(prepared: Prepared, store: Store) -> Opened:
    """Return the study that the request names, created or continued.

    Raises ``InvalidRequestError`` where the name is taken by another request, workload or machine, or by a study that
    is not autotune's.
    """
    request = prepared.request
    assert request.study is not None, "a search runs under a name"
    known = store.study(request.study)
    if known is not None:
        return _continue(known, prepared, store)
    # Imports Optuna, which commands that only read a request do not need.
    from autotune.tuning.optuna_study import OptunaStudy

    if OptunaStudy.exists(request.study, store):
        raise InvalidRequestError(
            f"{store.label} holds an Optuna study {request.study!r} that autotune did not make",
            "choose another --study",
        )
    study = StudyRecord(
        name=request.study,
        workload_id=store.intern_workload(request.workload.recorded_document(), request.workload.fingerprint()),
        environment_id=store.intern_environment(prepared.environment, prepared.environment_fingerprint),
        request=request.document(),
        ceiling=prepared.ceiling.document(),
        autotune_version=__version__,
    )
    store.create_study(study)
    return Opened(study, prepared)


def _continue(known: StudyRecord, prepared: Prepared, store: Store) -> Opened:
    _check_is_the_same(known, prepared, store)
    store.lose_running_trials(known.id)
    notes = []
    recorded = Ceiling.from_document(known.ceiling)
    if recorded.line_bytes > prepared.ceiling.cap_bytes:
        notes.append(
            f"only {format_bytes(prepared.ceiling.cap_bytes)} can be reserved now; the study's trials could "
            f"reserve {format_bytes(recorded.cap_bytes)}, and its verdicts are relative to that"
        )
    trials = tuple(store.trials(known.id))
    name = f"the study {known.name}"
    beginning = f"{name} was finished" if known.state == "finished" else f"continuing {name}"
    notes.append(f"{beginning}, {plural(len(trials), 'trial')} recorded")
    study = replace(known, state="running", ended_at=None)
    store.update_study(study)
    # Verdicts under two ceilings cannot be compared, so the study keeps its own.
    return Opened(study, replace(prepared, ceiling=recorded), trials, tuple(notes))


def _check_is_the_same(known: StudyRecord, prepared: Prepared, store: Store) -> None:
    """Raise ``InvalidRequestError`` where the recorded study is of another request, workload or machine."""
    workload = store.workload_of(known)
    environment = store.environment(known.environment_id)
    changed = changes_since(prepared, known.request, workload, environment)
    if changed:
        raise InvalidRequestError(
            f"the study {known.name!r} was made with other settings ({'; '.join(changed)})",
            "repeat what it was searched with, or search anew under another --study",
        )


@dataclass(frozen=True)
class Budget:
    """Return the budget of a continued study; ``None`` keeps the recorded one."""

    trials: int | None = None
    time_budget_seconds: float | None = None
    trial_timeout_seconds: float | None = None


def recorded_options(store: Store, study: str) -> dict[str, str]:
    """Return the options that ask a cluster for what a study ran on; raises ``UnknownStudyError``."""
    environment = store.environment(store.existing_study(study).environment_id)
    if environment.get("device_kind") == "cpu":
        return {"device": "cpu"}
    return {"gpus": str((environment.get("ranks") or {}).get("world_size", 1))}


def recorded_request(
    store: Store,
    study: str,
    device: str | None = None,
    budget: Budget | None = None,
    devices: Sequence[Device] = (),
    *,
    parallel: bool = False,
) -> SearchRequest:
    """Return the request that continues the study with this name, on the device that it ran on, or on ``device``.

    ``devices`` are used instead where given, one for each rank: those that the user names, or of a node of a cluster.
    With ``parallel`` a trial of one rank runs on each of them.

    Raises ``UnknownStudyError``; ``DeviceError`` where this machine has no such device; ``StorageError`` for a
    malformed record; and ``InvalidRequestError`` where the user's code or dataset is gone or has changed.
    """
    record = store.existing_study(study)
    try:
        environment = store.environment(record.environment_id)
        found, *others = devices or _devices_of(environment, study, device)
        beside: tuple[Device, ...] = ()
        if devices:
            _check_are_as_many(environment, study, devices, parallel=parallel)
        if parallel:
            beside, others = tuple(others), []
        workload = Workload.from_document(store.workload_of(record))
        request = request_from_document(record.request, workload, found, study, tuple(others))
    except (ValueError, InvalidRequestError) as error:
        raise StorageError(
            f"the request of the study {study!r} cannot be read: {error}",
            "repeat the options of the search with autotune search and the same --study",
        ) from error
    if workload.source is not None:
        _check_has_its_secrets(workload.source, study)
        today = replace(workload, source=workload.source.as_it_is_now())
        request = replace(request, workload=today)
    if workload.data is not None:
        check_unchanged(workload.data)
    spent = {name: value for name, value in dataclasses.asdict(budget or Budget()).items() if value is not None}
    return replace(request, **spent, beside=beside)


def _check_are_as_many(environment: Document, study: str, devices: Sequence[Device], *, parallel: bool) -> None:
    """Raise ``DeviceError`` where a study's trials cannot run on these devices."""
    ranks = (environment.get("ranks") or {}).get("world_size", 1)
    of = "one device" if ranks == 1 else f"{ranks} devices"
    if parallel and ranks > 1:
        raise DeviceError(
            f"the study {study!r} has trials of {of}, which are not run side by side", "leave --parallel out"
        )
    if not parallel and len(devices) != ranks:
        raise DeviceError(
            f"the study {study!r} has trials of {of}, and --gpus names {len(devices)}",
            "add --parallel to run a trial on each" if ranks == 1 else f"use --gpus {ranks}",
        )


def _check_has_its_secrets(source: TrainingSource, study: str) -> None:
    """Raise ``InvalidRequestError`` where values of the script's options were masked in the record."""
    masked = masked_options(source.argv)
    if masked:
        raise InvalidRequestError(
            f"the study {study!r} was searched with {', '.join(masked)} for {source.name}, whose value is not recorded",
            f"repeat its command with the value and --study {study}: it goes on from what is recorded",
        )


def _devices_of(environment: Document, study: str, device: str | None) -> list[Device]:
    """Return a device for each rank of the study: those that it ran on, else others of their name."""
    ranks = (environment.get("ranks") or {}).get("world_size", 1)
    if ranks == 1:
        return [find_device(device) if device is not None else _device_of(environment, study)]
    if device is not None:
        raise DeviceError(
            f"the study {study!r} was searched on {ranks} devices, and --device {device} is one", "leave --device out"
        )
    return list(devices_of_ranks(environment, study))


def _device_of(environment: Document, study: str) -> Device:
    """Return the device that the study ran on, else another with the same name."""
    devices = list_devices()
    uuid, name = environment.get("device_uuid"), environment.get("device_name")
    like = [device for device in devices if device.name == name and device.kind == environment.get("device_kind")]
    for device in [*(device for device in like if device.uuid == uuid), *like]:
        return device
    raise DeviceError(
        f"the study {study!r} was searched on {name} ({uuid}), which is not here",
        "name a device of the same kind with --device, or search anew under another --study",
    )


def no_result(history: History, request: SearchRequest, stop: Stop, *, log_folder: Path) -> AutotuneError:
    """Return the error that says why a search has nothing to recommend."""
    # No candidate was left to try.
    is_certain = stop.reason is StopReason.NOTHING_LEFT
    tried, ceiling = history.tried, history.ceiling
    failed = [t.outcome for t in tried if isinstance(t.outcome, Failed)]
    if not any(history.is_over(t) for t in tried):
        if failed:
            return NoResultError(
                f"no candidate completed; the last one failed: {failed[-1].message}",
                f"its log is in {log_folder}",
            )
        if not is_certain:
            return NoResultError(f"no candidate was run: {stop.sentence}", "raise --trials or --time-budget")
    return NothingFitsError(
        f"nothing {'' if is_certain else 'that was tried '}fits under {format_bytes(ceiling.line_bytes)} "
        f"({format_bytes(ceiling.cap_bytes)} less headroom); {_how_many(tried)}"
        + (f", {len(failed)} of them failed" if failed else ""),
        _what_may_help(request, is_certain=is_certain),
    )


def _how_many(tried: Sequence[Tried]) -> str:
    """Return ``26 trials were run`` or ``4 trials were run, 22 reused``."""
    reused = sum(source_of(t.outcome) is not None for t in tried)
    run = len(tried) - reused
    return f"{plural(run, 'trial')} {'was' if run == 1 else 'were'} run" + (f", {reused} reused" if reused else "")


def _what_may_help(request: SearchRequest, *, is_certain: bool) -> str:
    """Return what the user can still do after a search in which nothing fits."""
    workload = request.workload
    ways = [
        ("search on with the same --study and more --trials or --time-budget", not is_certain),
        ("raise --memory-limit", request.memory_limit_bytes is not None),
        ("free memory on the device or take a larger one", request.memory_limit_bytes is None),
        ("shorten --seq-len", workload.is_text),
        ("allow --gradient-checkpointing auto", request.gradient_checkpointing == "off"),
        ("leave --batch-multiple out", (request.batch_multiple or 1) > 1),
    ]
    return ", or ".join(way for way, is_open in ways if is_open)
