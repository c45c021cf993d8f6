"""Describe the API as OpenAPI: what each request takes and answers, who may send it, and what a refusal looks like."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Literal, NotRequired, TypedDict

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from autotune.core.candidate import Document
from autotune.core.option_kinds import LEVERS, Kind
from autotune.core.options import BY_NAME
from autotune.core.schema import json_schemas
from autotune.results.json_document import StudyDocument, candidate_type, trial_type
from autotune.results.predicted import AdviceDocument, PredictionDocument, arm_prediction_type, best_prediction_type
from autotune.service.predictions import NAMES, Command
from autotune.service.problems import MEDIA_TYPE
from autotune.service.requests import OPTION_NAMES
from autotune.store.queue import JobState
from autotune.verify.throughput import VerificationDocument


class ProblemDocument(TypedDict):
    """The problem with a request (RFC 9457), with the exit code of the command line."""

    type: str
    title: str
    status: int
    detail: str
    hint: str
    exit_code: int


class FailureDocument(TypedDict):
    """Why a search failed."""

    exit_code: int
    message: str
    hint: str


class NeedsDocument(TypedDict):
    """The devices that a search needs; ``null`` leaves a property open."""

    device_kind: str | None
    gpu: str | None
    memory_bytes: int | None
    count: int


class PlaceDocument(TypedDict):
    """The host and devices on which a search runs, or ran last."""

    host: str
    kind: NotRequired[str]
    name: NotRequired[str]
    uuids: NotRequired[list[str]]


class StatusDocument(TypedDict):
    """The running trial and the best so far, in words."""

    running: str
    best: NotRequired[str]
    waits_for: NotRequired[str]


class LinksDocument(TypedDict):
    """URL paths of a search's events, trials, report, export and page."""

    self: str
    events: str
    trials: str
    report: str
    export: str
    page: str


class SearchDocument(TypedDict):
    """A search. ``waits_for`` is the reason why it does not run yet, or waits after its start."""

    id: str
    number: int
    study: str
    state: JobState
    request: dict[str, Any]
    needs: NeedsDocument
    priority: int
    waits_for: str | None
    cancel_asked: bool
    device: PlaceDocument | None
    attempts: int
    status: StatusDocument | None
    problem: FailureDocument | None
    submitted_by: str
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    links: LinksDocument


class SearchesDocument(TypedDict):
    """Searches, the newest first."""

    searches: list[SearchDocument]


class DeviceDocument(TypedDict):
    """A device, and what runs on it; besides these fields those of ``autotune devices --json``."""

    host: str
    label: str
    name: str
    kind: str
    uuid: str
    search: str | None
    study: str | None


class DevicesDocument(TypedDict):
    """The devices on which searches run."""

    devices: list[DeviceDocument]


class HealthDocument(TypedDict):
    """Whether the service works; ``degraded``: a device cannot be used now."""

    status: Literal["ok", "degraded"]
    version: str


class TrialsDocument(TypedDict):
    """The trials of a search."""

    trials: list[trial_type()]  # type: ignore[valid-type]


class AdvisedDocument(TypedDict):
    """Which GPUs to rent: as JSON, as lines of text, and how it is known."""

    advice: AdviceDocument
    lines: list[str]
    notes: list[str]


class VerifyingDocument(SearchDocument):
    """A verification: a job like a search, with its result once it has ended."""

    verification: VerificationDocument | None
    lines: list[str] | None
    missed: FailureDocument | None


def _json_content(kind: Any) -> dict[str, Any]:
    return {"application/json": kind}


_EVENTS = "text/event-stream"
_Answer = dict[int, dict[str, Any]]
_ANSWERS: dict[tuple[str, str], _Answer] = {
    ("get", "/healthz"): {200: _json_content(HealthDocument)},
    ("get", "/metrics"): {200: {"text/plain": str}},
    ("post", "/v1/searches"): {202: _json_content(SearchDocument), 200: _json_content(SearchDocument)},
    ("get", "/v1/searches"): {200: _json_content(SearchesDocument)},
    ("get", "/v1/searches/{search}"): {200: _json_content(SearchDocument)},
    ("delete", "/v1/searches/{search}"): {202: _json_content(SearchDocument)},
    ("get", "/v1/searches/{search}/trials"): {200: _json_content(TrialsDocument)},
    ("get", "/v1/searches/{search}/trials/{number}/log"): {200: {"text/plain": str}},
    ("get", "/v1/searches/{search}/report"): {
        200: {"application/json": StudyDocument, "text/plain": str, "text/html": str}
    },
    ("get", "/v1/searches/{search}/export"): {200: {"text/plain": str}},
    ("get", "/v1/searches/{search}/events"): {200: {_EVENTS: str}},
    ("post", "/v1/predict"): {200: _json_content(PredictionDocument)},
    ("post", "/v1/advise"): {200: _json_content(AdvisedDocument)},
    ("post", "/v1/verify"): {202: _json_content(VerifyingDocument), 200: _json_content(VerifyingDocument)},
    ("get", "/v1/verify/{verification}"): {200: _json_content(VerifyingDocument)},
    ("get", "/v1/devices"): {200: _json_content(DevicesDocument)},
    ("get", "/v1/events"): {200: {_EVENTS: str}},
}
# Fields whose types are made of the fields of others while the program runs, so that no annotation can name them.
_TYPED_LATER: dict[tuple[str, str], Any] = {
    ("StudyDocument", "best"): trial_type(),
    ("StudyDocument", "baseline"): trial_type(),
    ("StudyDocument", "trials"): trial_type(),
    ("ExpertDocument", "candidate"): candidate_type(),
    ("VerificationDocument", "candidate"): candidate_type(),
    ("GpuPredictionDocument", "best"): best_prediction_type(),
    ("GpuPredictionDocument", "arms"): arm_prediction_type(),
    ("PredictionDocument", "arms"): arm_prediction_type(),
}
_NEEDS_NO_TOKEN = ("/healthz",)
_NEEDS: Document = {
    "type": "object",
    "properties": {
        "gpu": {"type": "string", "description": "A part of the GPU's name."},
        "memory_bytes": {"type": "integer"},
        "count": {"type": "integer", "minimum": 1},
    },
    "additionalProperties": False,
}
_PRIORITY: Document = {"type": "integer", "minimum": 0, "maximum": 10, "default": 0}


def describe_api(app: FastAPI) -> Document:
    """Return the OpenAPI description of an application. Raises ``KeyError`` for a route that is not in ``_ANSWERS``."""
    described = get_openapi(
        title="autotune", version=app.version, description="Searches for training configurations.", routes=app.routes
    )
    kinds = list(dict.fromkeys(kind for answer in _ANSWERS.values() for media in answer.values()
                               for kind in media.values()))  # fmt: skip
    kinds += dict.fromkeys(_TYPED_LATER.values())
    references, schemas = json_schemas([*kinds, ProblemDocument], "#/components/schemas/{name}")
    schema_of = dict(zip(kinds, references, strict=False))
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = {
                str(code): {
                    "description": HTTPStatus(code).phrase,
                    "content": {media: {"schema": schema_of[kind]} for media, kind in content.items()},
                }
                for code, content in _ANSWERS[method, path].items()
            } | {str(code): {"$ref": "#/components/responses/Problem"} for code in _refusals(method, path)}
            if path in _NEEDS_NO_TOKEN:
                operation["security"] = []
    for (document, field), kind in _TYPED_LATER.items():
        properties = schemas[document]["properties"]
        of_kind = schema_of[kind]
        is_list = properties[field].get("type") == "array"
        properties[field] |= {"items": of_kind} if is_list else {"anyOf": [of_kind, {"type": "null"}]}
    described["components"] = {
        "schemas": schemas,
        "responses": {"Problem": {"description": "A refusal.", "content": {MEDIA_TYPE: {"schema": references[-1]}}}},
        "securitySchemes": {
            "token": {"type": "http", "scheme": "bearer", "description": "From autotune serve or autotune token add."}
        },
    }
    described["security"] = [{"token": []}]
    _complete_arrays(described)
    return described


def _complete_arrays(schema: Any) -> None:
    """Add ``items`` to arrays, as client generators require: the first of ``prefixItems``, else any type."""
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            schema["items"] = schema.get("items") or schema.get("prefixItems", [{}])[0]
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            _complete_arrays(each)


def _refusals(method: str, path: str) -> list[int | str]:
    """Return the status codes with which a request may be refused; ``default`` stands for any other code."""
    codes: list[int | str] = [] if path in _NEEDS_NO_TOKEN else [401]
    codes += [403] if method != "get" else []
    codes += [404] if "{" in path else []
    codes += [422] if method == "post" or "{" in path else []
    codes += [429] if method == "post" or path.endswith("/events") else []
    return [*codes, 503, "default"]


def search_body() -> Document:
    """Return the schema of a request for a search."""
    body = _options_schema(OPTION_NAMES)
    body["properties"]["device"]["description"] = "cpu, cuda, or a part of a GPU's name [default: any]"
    body["properties"] |= {"priority": _PRIORITY, "needs": _NEEDS}
    return _json_body({**body, "description": "The options of a search: model or code, and what else is to be set."})


def prediction_body(command: Command) -> Document:
    """Return the schema of a request for ``predict`` or ``advise``."""
    return _json_body({**_options_schema(NAMES[command]), "required": ["model"]})


def verification_body() -> Document:
    """Return the schema of a request for a verification."""
    body = _options_schema(("steps",))
    body["properties"] |= {"study": {"type": "string"}, "priority": _PRIORITY}
    return _json_body({**body, "required": ["study"]})


def _json_body(schema: Document) -> Document:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _options_schema(names: Sequence[str]) -> Document:
    """Return the schema of an object with these options."""
    options = (BY_NAME[name] for name in names)
    properties = {option.name: {**_values(option.kind), "description": option.help} for option in options}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _values(kind: Kind) -> Document:
    """Return the JSON schema of an option's values, with text where a form such as ``24GiB`` is accepted."""
    word: Document = {"type": "string"}
    if kind.choices:
        word["enum"] = list(kind.choices)
    if kind is LEVERS:
        return {"anyOf": [word, {"type": "object"}]}
    listed = {"anyOf": [{"type": "array", "items": word}, {"type": "string"}]}
    known: dict[str, Document] = {
        "flag": {"type": "boolean"},
        "n": {"type": "integer", "minimum": kind.least},
        "choice": word,
        "list": listed,
        "list|auto": listed,
        "n,…": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]},
    }
    is_number = kind.json in (int, float) or "size" in kind.name
    return known.get(kind.name, {"anyOf": [{"type": "number"}, {"type": "string"}]} if is_number else word)
