"""Open a study, new or recorded, restore the request of a recorded one, and say what differs from it.

A study is the same where its request, its workload and its environment are. ``check_source`` compares what is
known before the user's code is run, ``what_differs`` what is known before a process with torch is started, and
``changes_since`` all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.ceiling import Ceiling
from autotune.core.device import Device
from autotune.core.errors import DeviceError, InvalidRequestError, StorageError
from autotune.core.inspection import Software
from autotune.core.outcome import Completed
from autotune.core.schema import decode, encode
from autotune.core.training_source import TrainingSource, masked_options
from autotune.core.units import format_bytes, plural
from autotune.core.workload import Workload
from autotune.devices.listing import devices_of_ranks, find_device, ranks_of
from autotune.models.dataset_files import check_unchanged, commit_of
from autotune.results.wording import state_of
from autotune.space.features import version_of
from autotune.store.records import StudyRecord, TrialRecord
from autotune.store.repository import Store
from autotune.tuning.allowed import check_request
from autotune.tuning.environment import (
    comparable_environment,
    describe_environment,
    environment_fingerprint,
    is_same_machine,
    measured_environment,
)
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest, differences, request_fields, request_from_document


@dataclass(frozen=True)
class Opened:
    """A study to search in, new or continued, with its recorded trials."""

    study: StudyRecord
    prepared: Prepared
    """The search, with the ceiling that the study's verdicts are relative to."""
    trials: tuple[TrialRecord, ...] = ()
    """The trials recorded so far on this machine, in order."""
    elsewhere: tuple[TrialRecord, ...] = ()
    """The trials that were recorded on another machine, where the study began."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


def open_study(prepared: Prepared, store: Store) -> Opened:
    """Return the study that the request names, continued or newly recorded.

    Raises ``InvalidRequestError`` where the name belongs to another request, workload or kind of machine.
    """
    request = prepared.request
    assert request.study is not None, "a search runs under a name"
    known = store.study(request.study)
    if known is not None:
        return _continue(known, prepared, store)
    study = StudyRecord(
        name=request.study,
        workload_id=store.intern_workload(request.workload.recorded_document(), request.workload.fingerprint()),
        environment_id=store.intern_environment(prepared.environment, environment_fingerprint(prepared.environment)),
        request=request.document(),
        ceiling=encode(prepared.ceiling),
        autotune_version=__version__,
    )
    store.create_study(study)
    return Opened(study, prepared)


def _continue(known: StudyRecord, prepared: Prepared, store: Store) -> Opened:
    """Return the recorded study to continue. Raises ``InvalidRequestError`` where the search differs from it."""
    recorded_environment = store.environment(known.environment_id)
    _refuse_changes(known, changes_since(prepared, known.request, store.workload_of(known), recorded_environment))
    # Trials that are recorded as running were lost with their process.
    store.lose_running_trials(known.id)
    notes = []
    if not is_same_machine(recorded_environment, prepared.environment):
        here = store.intern_environment(prepared.environment, environment_fingerprint(prepared.environment))
        known = replace(known, environment_id=here)
    recorded = decode(known.ceiling, Ceiling)
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


def check_source(store: Store, name: str, request: SearchRequest) -> None:
    """Raise ``InvalidRequestError`` where a recorded study has other code or another command.

    This check needs no run of the code; ``open_study`` compares the rest later.
    """
    known = store.study(name)
    if known is not None and request.workload.source is not None:
        documents = store.workload_of(known), _as_recorded(request.workload.recorded_document())
        recorded, asked = ({"source": _without_inspection(each.get("source"))} for each in documents)
        _refuse_changes(known, _changes_in_words(recorded, asked))


def _refuse_changes(known: StudyRecord, changed: Sequence[str]) -> None:
    """Raise ``InvalidRequestError`` that names the differences from a recorded study, where there are any."""
    if changed:
        raise InvalidRequestError(
            f"the study {known.name!r} was made with other settings ({'; '.join(changed)})",
            "repeat what it was searched with, or search anew under another --study",
        )


def device_options(store: Store, study: str) -> dict[str, str]:
    """Return the options that request the devices of a study from a cluster. Raises ``UnknownStudyError``."""
    environment = store.environment(store.existing_study(study).environment_id)
    if environment.get("device_kind") == "cpu":
        return {"device": "cpu"}
    return {"gpus": str(ranks_of(environment))}


def recorded_request(
    store: Store,
    study: str,
    device: str | None = None,
    limits: Mapping[str, Any] | None = None,
    devices: Sequence[Device] = (),
    *,
    parallel: bool = False,
) -> SearchRequest:
    """Return the request that continues a study on its recorded device or on ``device``.

    ``limits`` are new values for options of the budget; ``None`` keeps a recorded value. ``devices``, which the user or
    a cluster's node names, replace the recorded ones: one for each rank or, with ``parallel``, each with trials of one
    rank.

    Raises ``UnknownStudyError``; ``DeviceError`` where this machine has no such device; ``StorageError`` for a
    malformed record; ``InvalidRequestError`` where the user's code or dataset is gone or has changed; and the errors of
    ``check_request``.
    """
    record = store.existing_study(study)
    try:
        environment = store.environment(record.environment_id)
        found, *others = devices or _devices_of(environment, study, device)
        beside: tuple[Device, ...] = ()
        if devices:
            _check_as_many_as_ranks(environment, study, devices, parallel=parallel)
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
    request = replace(request, **request_fields(limits or {}), beside=beside)
    check_request(request)
    return request


def _check_as_many_as_ranks(environment: Document, study: str, devices: Sequence[Device], *, parallel: bool) -> None:
    """Raise ``DeviceError`` unless there is one device for each rank or, with ``parallel``, each trial has one rank."""
    ranks = ranks_of(environment)
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
    """Raise ``InvalidRequestError`` where values of the script's options were masked as secrets in the record."""
    masked = masked_options(source.argv)
    if masked:
        raise InvalidRequestError(
            f"the study {study!r} was searched with {', '.join(masked)} for {source.name}, whose value is not recorded",
            f"repeat its command with the value and --study {study}: it goes on from what is recorded",
        )


def _devices_of(environment: Document, study: str, device: str | None) -> Sequence[Device]:
    """Return a device for each rank of the study: the named one, or the recorded ones, else others of their name."""
    ranks = ranks_of(environment)
    if device is None:
        return devices_of_ranks(environment, study)
    if ranks > 1:
        raise DeviceError(
            f"the study {study!r} was searched on {ranks} devices, and --device {device} is one", "leave --device out"
        )
    return (find_device(device),)


# Memory that may be reserved is the same for a search where it differs by no more than this share. A choice.
_SAME_MEMORY = 0.02
# Facts of an environment that only a process with torch tells.
_TOLD_BY_PROCESS = frozenset({"python", "cuda", "cudnn", "cublas", "measurement_revision"})


def changes_since(prepared: Prepared, request: Document, workload: Document, environment: Document) -> list[str]:
    """Return the differences that keep this search from continuing a recorded study: ``name: recorded, now asked``."""
    asked = {
        **prepared.request.workload.recorded_document(),
        **prepared.request.document(),
        **comparable_environment(prepared.environment, environment),
    }
    # Measurements do not depend on the values of weights: workloads that differ only in these share one record.
    asked["weights"] = workload["weights"]
    asked["data"] = _ignore_unknown_commit(asked["data"], workload.get("data"))
    workload = {**workload, "source": _without_inspection(workload.get("source"))}
    asked["source"] = _without_inspection(asked["source"])
    recorded = {**workload, **request, **measured_environment(environment)}
    return [*_revision_change(recorded, asked, prepared), *_changes_in_words(recorded, _as_recorded(asked))]


def what_differs(store: Store, known: StudyRecord, request: SearchRequest) -> str | None:
    """Return in words why a request that names no study does not continue this one; ``None`` where it does."""
    if request.fresh:
        return "--fresh measures again"
    if request.workload.source is not None:
        return "your own code may have changed"
    if request.workload.data is not None:
        return "the dataset may have changed"
    asked = _as_recorded({**request.workload.recorded_document(), **request.document()})
    changed = differences({**store.workload_of(known), **known.request}, asked)
    return changed[0] if changed else _other_place(store, known, request)


def _other_place(store: Store, known: StudyRecord, request: SearchRequest) -> str | None:
    """Return in words how the machine of a request differs from that of a study; ``None`` where no difference is known.

    Facts that only a process with torch tells are not compared.
    """
    environment = store.environment(known.environment_id)
    software = Software("", {name: version_of(name) for name in environment.get("packages", {})}, ())
    today = describe_environment(request.placement, request.workload, [], software, 0)
    if not is_same_machine(environment, today):
        return "it was searched on another machine"
    facts = [
        {name: value for name, value in measured_environment(each).items() if name not in _TOLD_BY_PROCESS}
        for each in (environment, today)
    ]
    changed = differences(*facts)
    return changed[0] if changed else _other_memory(store, known, request)


def _other_memory(store: Store, known: StudyRecord, request: SearchRequest) -> str | None:
    """Return in words how the memory of a study and a request differ; ``None`` where this changes no answer."""
    then = decode(known.ceiling, Ceiling)
    now = Ceiling(request.memory_limit_bytes, request.least_free_bytes, then.context_bytes, request.headroom)
    if abs(now.cap_bytes - then.cap_bytes) <= _SAME_MEMORY * then.cap_bytes:
        return None
    if request.device.kind == "cpu" and known.best_trial_id:
        # What other programs leave free of a host changes all the time.
        best = store.trial(known.best_trial_id)
        measured = best.outcome.measurement if best is not None and isinstance(best.outcome, Completed) else None
        if best is not None and measured is not None and measured.fits(best.candidate.arm, now):
            return None
    return f"{format_bytes(then.cap_bytes)} could be reserved then, and {format_bytes(now.cap_bytes)} can now"


def _as_recorded(document: Document) -> Document:
    """Return a document after a round trip through JSON, so that it compares equal to a stored one."""
    read: Document = json.loads(json.dumps(document))
    return read


def _revision_change(recorded: Document, asked: Document, prepared: Prepared) -> list[str]:
    """Remove the measurement revision (see ``prepare.py``) from both documents; return in words how it differs."""
    then, today = recorded.pop("measurement_revision", 1), prepared.environment["measurement_revision"]
    asked.pop("measurement_revision", None)
    if then == today:
        return []
    return [f"measured by another version of autotune, whose trials differ: measurement revision {then}, now {today}"]


def _without_inspection(source: Document | None) -> Document | None:
    """Return a source's record without the results of its inspection, which older records lack."""
    return {name: value for name, value in source.items() if name != "interface"} if source else source


def _ignore_unknown_commit(data: Document | None, recorded: Document | None) -> Document | None:
    """Return ``data`` with the content of ``recorded`` where the commit of either on the hub is unknown.

    ``data`` is a dataset's record, ``recorded`` the study's: they then compare equal.
    """
    if not data or not recorded or data["kind"] != "hub" or data["source"] != recorded["source"]:
        return data
    is_known = commit_of(data["content"]) and commit_of(recorded["content"])
    return data if is_known else {**data, "content": recorded["content"]}


# Fields about the content of files, rather than how they are used.
_CONTENT = frozenset({"digest", "content", "facts", "tokenizer_content"})


def _changes_in_words(recorded: Document, asked: Document) -> list[str]:
    """Return the differences between two documents in words; of the user's data and code without the content."""
    named = []
    for name, key in (("data", "source"), ("source", "file")):
        before, now = recorded.get(name), asked.get(name)
        # A tokenizer is identified by its content, wherever it is.
        if before == now or (before and now and {**before, "tokenizer": None} == {**now, "tokenizer": None}):
            continue
        if before and now and before[key] == now[key]:
            uses = [{k: v for k, v in document.items() if k not in _CONTENT} for document in (before, now)]
            changed = [f"{name}.{difference}" for difference in differences(*uses)]
            named += changed or [f"{now[key]} has changed since"]
        else:
            named.append(f"{name}: {before[key] if before else 'none'}, now {now[key] if now else 'none'}")
    # The labels in a model's config come from the dataset.
    own = {"data", "data_at", "source", *(["config"] if named else [])}
    facts = ({key: value for key, value in document.items() if key not in own} for document in (recorded, asked))
    return named + differences(*facts)
