"""Compare a search with a recorded study, and say what differs.

A study is the same where its request, its workload and its environment are. ``changes_of_source`` compares what is
known before the user's code is run, ``what_differs`` what is known before a process with torch is started, and
``changes_since`` all of it.
"""

from __future__ import annotations

import json

from autotune.core.candidate import Document
from autotune.core.ceiling import Ceiling
from autotune.core.inspection import Software
from autotune.core.outcome import Completed
from autotune.core.units import format_bytes
from autotune.models.dataset_files import commit_of
from autotune.space.features import version_of
from autotune.store.records import StudyRecord
from autotune.store.repository import Store
from autotune.tuning.environment import (
    comparable_environment,
    describe_environment,
    is_same_machine,
    measured_environment,
)
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest, differences

# Memory that may be reserved is the same for a search where it differs by no more than this share. A choice.
_SAME_MEMORY = 0.02
# What only the process with torch tells of an environment.
_TOLD_BY_PROCESS = frozenset({"python", "cuda", "cudnn", "cublas", "measurement_revision"})


def changes_since(prepared: Prepared, request: Document, workload: Document, environment: Document) -> list[str]:
    """Return what keeps this search from continuing a recorded study, as ``name: recorded, now asked``."""
    asked = {
        **prepared.request.workload.recorded_document(),
        **prepared.request.document(),
        **comparable_environment(prepared.environment, environment),
    }
    # Measurements do not depend on the values of weights, and workloads that differ only in those share one record.
    asked["weights"] = workload["weights"]
    asked["data"] = _as_far_as_known(asked["data"], workload.get("data"))
    workload = {**workload, "source": _as_asked(workload.get("source"))}
    asked["source"] = _as_asked(asked["source"])
    recorded = {**workload, **request, **measured_environment(environment)}
    return [*_revision_change(recorded, asked, prepared), *_in_short(recorded, _as_recorded(asked))]


def changes_of_source(request: SearchRequest, workload: Document) -> list[str]:
    """Return what of the user's own code and command differs from a recorded workload; known before it is run."""
    asked = _as_recorded(request.workload.recorded_document())
    return _in_short({"source": _as_asked(workload.get("source"))}, {"source": _as_asked(asked["source"])})


def what_differs(store: Store, known: StudyRecord, request: SearchRequest) -> str | None:
    """Say what keeps a recorded study from answering a request that names none; ``None`` where it may go on with it."""
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
    """Say how the machine of a request differs from that of a study, as far as this process knows it."""
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
    """Say how much memory a study and a request may reserve, where the study's answer depends on that."""
    then = Ceiling.from_document(known.ceiling)
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
    """Return a document as a database returns it, so that equal values compare equal."""
    read: Document = json.loads(json.dumps(document))
    return read


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
    facts = ({key: value for key, value in document.items() if key not in own} for document in (recorded, asked))
    return named + differences(*facts)
