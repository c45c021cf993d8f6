"""Define the work that an engine gets, its messages about the work, and the protocols of engines and their runs.

An engine runs a whole search, or a verification of a winner, in a process of its own. That process says what happens in
messages to the client, the process that asked for the work; the last message is an end.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from autotune.core.arguments import check_arguments
from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import DeviceError, InvalidRequestError
from autotune.core.options import BRINGS_CODE
from autotune.tuning.options import request_of
from autotune.tuning.request import SearchRequest

CodeKind = Literal["trainer", "loop", "script"]
WorkKind = Literal["search", "resume", "verify"]

EVENTS = ("line", "study", "trial_begins", "trial", "verification")
"""The kinds of messages that a service keeps: lines as the terminal shows them, and what its pages draw."""
# Options of a search that are not sent with the work: they concern only the asking process, or bring code along.
NOT_OF_THE_WORK = frozenset(
    {"storage", "wait", "as_json", "server", "priority", "executor", "verify", "code", *BRINGS_CODE}
)


@dataclass(frozen=True, slots=True)
class Code:
    """The user's own training code, on the machine where the search runs."""

    kind: CodeKind
    value: str | tuple[str, ...]
    """As the command line has it: ``FILE:FUNCTION``, or a script's words."""
    folder: str
    """Its working directory."""

    def placed(self, request: SearchRequest) -> SearchRequest:
        """Return a request for this code, with the code's folder as the working directory of trials."""
        source = request.workload.source
        assert source is not None
        source = dataclasses.replace(source, cwd=self.folder)
        return dataclasses.replace(request, workload=dataclasses.replace(request.workload, source=source))


@dataclass(frozen=True, slots=True)
class Work:
    """A search or a verification that an engine is to run."""

    id: str
    """Of this attempt: the same search may be tried again after a loss."""
    study: str
    options: Document
    """The options that the user gave, JSON-ready."""
    kind: WorkKind = "search"
    code: Code | None = None
    devices: tuple[str, ...] = ()
    """By UUID; an empty tuple stands for all GPUs that the process sees, or the CPU."""
    storage: str | None = None
    """The database that the process writes itself; ``None`` for a temporary one, whose records it sends."""
    studies: tuple[Document, ...] = ()
    """For a temporary database: the studies to copy into it, among them the one that is continued."""
    folders: tuple[str, ...] | None = None
    """The only folders whose files the options may name, for work that another user asks for; ``None`` for any."""
    wait: bool = True
    """Whether to wait while another search holds a device or the study."""


@dataclass(frozen=True, slots=True)
class Message:
    """An event of some work, as its process tells the client.

    Besides the kinds of ``EVENTS``: ``status`` (what runs now), ``record`` (a study as ``take_in`` takes it), ``log``
    (the end of a trial's log, by its number) and ``end``, whose ``state`` is ``finished``, ``failed``, ``interrupted``
    (it was told to end) or ``lost`` (its process or node is gone).
    """

    number: int
    """Counts from 1."""
    kind: str
    document: Document


@dataclass(frozen=True, slots=True)
class Host:
    """A machine on which an engine runs searches."""

    name: str
    devices: tuple[Device, ...]
    node: str = ""
    """How the engine knows it."""


class Run(Protocol):
    """A search that an engine runs."""

    def messages(self, after: int, wait_seconds: float) -> list[Message]:
        """Return the messages with numbers above ``after``, waiting for the first at most ``wait_seconds``.

        Messages up to ``after`` are acknowledged and dropped. The last message of all is an end.
        """

    def cancel(self) -> None:
        """Cancel the search. Its end is a message."""

    def close(self) -> None:
        """Release the run after its end, or end it without further messages."""


class Engine(Protocol):
    """Runs whole searches."""

    shares_storage: bool
    """Whether its processes can write the client's database."""

    def hosts(self) -> Sequence[Host]:
        """Return the machines with the devices on which searches can be started."""

    def start(self, work: Work, host: Host) -> Run:
        """Start a search on the devices that ``work`` names. Raises ``AutotuneError`` where that is impossible."""

    def find(self, work_id: str) -> Run | None:
        """Return a search that an earlier process started; ``None`` where it is gone."""

    def problems(self) -> Sequence[str]:
        """Return the reasons why devices are unusable now, a line each."""

    def close(self) -> None:
        """End searches that cannot continue without this process; their runs get an end message."""


def search_request(
    options: Document, devices: Sequence[Device], study: str | None = None, code: Code | None = None
) -> SearchRequest:
    """Return the request of a work's options on these devices, for its ``code`` where it has any.

    Raises ``DeviceError`` for too few devices and the errors of single options; ``check_request`` is not called.
    """
    gpu_count = int(options["gpus"]) if str(options.get("gpus") or "").isdecimal() else 1
    given = {name: value for name, value in options.items() if name not in NOT_OF_THE_WORK}
    given = {**check_arguments(given), "device": devices[0].uuid}
    if code is not None:
        given[code.kind] = code.value
    if len(devices) < gpu_count:
        raise DeviceError(f"--gpus {gpu_count}: there are {len(devices)}", "ask for as many as one machine has")
    request = request_of(given, devices if options.get("gpus") else devices[:1])
    if code is not None:
        request = code.placed(request)
    return dataclasses.replace(request, study=study) if study is not None else request


def code_in(options: Document, folder: Path) -> Code | None:
    """Return the user's code that command-line options name, to be run in ``folder``; ``None`` where they name none."""
    for kind in ("trainer", "loop", "script"):
        value = options.get(kind)
        if value:
            return Code(kind, tuple(value) if kind == "script" else str(value), str(folder))
    return None


_MAY_BE_PATHS = ("model", "dataset", "tokenizer")


def check_paths(options: Document, folders: Sequence[Path]) -> None:
    """Raise ``InvalidRequestError`` for an option of a search with a path outside these folders.

    The service checks on submission, and the searching process checks again on its own machine, where the name of a hub
    repository may be a folder.
    """
    for name in _MAY_BE_PATHS:
        value = options.get(name)
        if isinstance(value, str) and not _may_be_read(value, folders):
            hint = (
                "use a name of the catalog or the hub; the operator can allow folders with autotune serve --data FOLDER"
            )
            if folders:
                hint = f"name a folder within {', '.join(map(str, folders))}"
            raise InvalidRequestError(f"{name}: this service reads no files at {value[:120]!r}", hint)


def _may_be_read(value: str, folders: Sequence[Path]) -> bool:
    """Return whether a service may read a value: a name of the catalog or the hub, or a path within ``folders``.

    A value that looks like a name is a path where a file of that name exists here.
    """
    looks_like_path = value.startswith((".", "~", "/")) or ".." in value.split("/") or "\\" in value or "\0" in value
    try:
        path = os.path.expanduser(value)
        if not looks_like_path and not os.path.lexists(path):
            return True
        real = Path(path).resolve()
        return os.path.isabs(path) and any(real.is_relative_to(folder.resolve()) for folder in folders)
    except (ValueError, OSError, RuntimeError):
        return False
