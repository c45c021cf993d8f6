"""The documents that the API answers with, as types: they are checked where they are made, and described by them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from autotune.store.queue import JobState


class ProblemDocument(TypedDict):
    """What is wrong with a request (RFC 9457), with the exit code that the command would end with."""

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
    """What a search needs of a machine; ``null`` leaves it open."""

    device_kind: str | None
    gpu: str | None
    memory_bytes: int | None
    count: int


class PlaceDocument(TypedDict):
    """Where a search runs, or ran last."""

    host: str
    kind: NotRequired[str]
    name: NotRequired[str]
    uuids: NotRequired[list[str]]


class StatusDocument(TypedDict):
    """What runs now, in words."""

    running: str
    best: NotRequired[str]
    waits_for: NotRequired[str]


class LinksDocument(TypedDict):
    """Where more of a search is."""

    self: str
    events: str
    trials: str
    report: str
    export: str
    page: str


class SearchDocument(TypedDict):
    """A search. ``waits_for`` says why one does not run yet, or what one that was started waits for."""

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
