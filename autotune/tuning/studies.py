"""Open a study, new or recorded, and restore the request of a recorded one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.ceiling import Ceiling
from autotune.core.device import Device
from autotune.core.errors import (
    DeviceError,
    InvalidRequestError,
    StorageError,
)
from autotune.core.masking import masked_options
from autotune.core.training_source import TrainingSource
from autotune.core.units import format_bytes, plural
from autotune.core.workload import Workload
from autotune.devices.listing import devices_of_ranks, find_device, list_devices
from autotune.models.dataset_files import check_unchanged
from autotune.results.wording import state_of
from autotune.store.records import StudyRecord, TrialRecord
from autotune.store.repository import Store
from autotune.tuning.allowed import check_request
from autotune.tuning.changes import changes_of_source, changes_since
from autotune.tuning.environment import is_same_machine
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest, request_from_document


@dataclass(frozen=True)
class Opened:
    """A study to search in, with what is recorded of it."""

    study: StudyRecord
    prepared: Prepared
    """The ceiling that the study's verdicts are relative to."""
    trials: tuple[TrialRecord, ...] = ()
    """The trials recorded so far on this machine, in order."""
    elsewhere: tuple[TrialRecord, ...] = ()
    """Those that were measured on another machine, which the study began on."""
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
    recorded_environment = store.environment(known.environment_id)
    _check_is_the_same(known, prepared, store, recorded_environment)
    store.lose_running_trials(known.id)
    notes = []
    if not is_same_machine(recorded_environment, prepared.environment):
        here = store.intern_environment(prepared.environment, prepared.environment_fingerprint)
        known = replace(known, environment_id=here)
    recorded = Ceiling.from_document(known.ceiling)
    if recorded.line_bytes > prepared.ceiling.cap_bytes:
        notes.append(
            f"only {format_bytes(prepared.ceiling.cap_bytes)} can be reserved now; the study's trials could "
            f"reserve {format_bytes(recorded.cap_bytes)}, and its verdicts are relative to that"
        )
    trials = store.trials(known.id)
    elsewhere = tuple(trial for trial in trials if trial.environment_id != known.environment_id)
    name = f"the study {known.name}"
    beginning = f"{name} was finished" if state_of(known) == "finished" else f"continuing {name}"
    notes.append(f"{beginning}, {plural(len(trials), 'trial')} recorded")
    if elsewhere:
        notes.append(
            f"{plural(len(elsewhere), 'trial')} of it ran on another machine: they decide what is tried first, and are "
            "measured again here"
        )
    study = replace(known, state="running", ended_at=None)
    store.update_study(study)
    # Verdicts under two ceilings cannot be compared, so the study keeps its own.
    own = tuple(trial for trial in trials if trial not in elsewhere)
    return Opened(study, replace(prepared, ceiling=recorded), own, elsewhere, tuple(notes))


def _check_is_the_same(known: StudyRecord, prepared: Prepared, store: Store, environment: Document) -> None:
    """Raise ``InvalidRequestError`` where the recorded study is of another request, workload or machine."""
    workload = store.workload_of(known)
    _refuse_changes(known, changes_since(prepared, known.request, workload, environment))


def check_source(store: Store, name: str, request: SearchRequest) -> None:
    """Raise ``InvalidRequestError`` where a recorded study is of other code or another command.

    ``open_study`` compares all of it, after the code was run.
    """
    known = store.study(name)
    if known is not None and request.workload.source is not None:
        _refuse_changes(known, changes_of_source(request, store.workload_of(known)))


def _refuse_changes(known: StudyRecord, changed: Sequence[str]) -> None:
    if changed:
        raise InvalidRequestError(
            f"the study {known.name!r} was made with other settings ({'; '.join(changed)})",
            "repeat what it was searched with, or search anew under another --study",
        )


@dataclass(frozen=True)
class Budget:
    """The budget of a continued study; ``None`` keeps the recorded one."""

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
    malformed record; ``InvalidRequestError`` where the user's code or dataset is gone or has changed; and what
    ``check_request`` raises.
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
        check_unchanged(workload.data, of_processor=workload.task == "image-text-to-text")
    spent = {name: value for name, value in dataclasses.asdict(budget or Budget()).items() if value is not None}
    request = replace(request, **spent, beside=beside)
    check_request(request)
    return request


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
