"""Say what keeps a search from continuing a recorded study."""

from __future__ import annotations

import json

from autotune.core.candidate import Document
from autotune.models.hub_revision import commit_of
from autotune.tuning.environment import comparable_environment, measured_environment
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest, differences


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
    # Converted to JSON and back, as the recorded ones were, so that equal values compare equal.
    return [*_revision_change(recorded, asked, prepared), *_in_short(recorded, json.loads(json.dumps(asked)))]


def changes_of_source(request: SearchRequest, workload: Document) -> list[str]:
    """Return what of the user's own code and command differs from a recorded workload; known before it is run."""
    asked = json.loads(json.dumps(request.workload.recorded_document()))
    return _in_short({"source": _as_asked(workload.get("source"))}, {"source": _as_asked(asked["source"])})


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
