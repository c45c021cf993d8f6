"""Run one search on a cluster for the command line, and record it in a database of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.core.arguments import json_value
from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import (
    AutotuneError,
    DeviceError,
    InvalidRequestError,
    ServiceError,
    TrialServerError,
    error_with_code,
)
from autotune.core.units import plural
from autotune.engine.ray import RayEngine
from autotune.engine.work import NOT_OF_THE_WORK, Code, Engine, Host, Message, Run, Work, code_in, search_request
from autotune.results.report import Report, load_report
from autotune.store.location import resolve_location
from autotune.store.opening import open_store
from autotune.store.records import StudyRecord
from autotune.store.repository import Store
from autotune.store.transfer import studies_for, take_in_study
from autotune.tuning.allowed import check_request
from autotune.tuning.exclusive import hold_lease, take_turn, waits_with
from autotune.tuning.interruption import Interruption, interrupted_by_signals
from autotune.tuning.run import keep_trial_log, study_names

if TYPE_CHECKING:
    from autotune.tuning.request import SearchRequest

_MOST_LOSSES = 3  # A search gives up after so many lost nodes. A choice.
_LISTEN_SECONDS = 1.0

Show = Callable[[Message], None]
"""Shows a message to the user."""


@dataclass(frozen=True)
class Asked:
    """A search that the user asked to run on a cluster, new or resumed."""

    options: Document
    """Those of the command line; ``device`` and ``gpus`` say what a node must have."""
    study: str | None = None
    resumes: bool = False

    @property
    def code(self) -> Code | None:
        """The user's own code, which every node has under the same path."""
        return None if self.resumes else code_in(self.options, Path.cwd())

    def work_options(self) -> Document:
        """Return the options to send to the node."""
        left_out = {*NOT_OF_THE_WORK, "device", "study"}
        return {name: json_value(value) for name, value in self.options.items() if name not in left_out}


def search_elsewhere(address: str, asked: Asked, storage: str, show: Show, *, wait: bool) -> tuple[StudyRecord, Report]:
    """Search on the Ray cluster at an address, record the search in ``storage``, and return its study and report.

    Where the node is lost, the search continues from its record, on another node or the same one. With ``wait``, the
    end of another search of the study is waited for. Raises the errors of a local search.
    """
    engine = RayEngine(address)
    try:
        host, devices = _place(engine, asked.options)
        with contextlib.ExitStack() as stack:
            request = _request_here(asked, storage, devices)
            path = resolve_location(storage).path
            has_database = path is None or path.exists()
            store = stack.enter_context(open_store(storage)) if has_database else None

            def is_taken(name: str) -> bool:
                return store is not None and store.study(name) is not None

            database = os.path.realpath(path) if path is not None else resolve_location(storage).label
            names = asked.study or (lambda: study_names(request))

            def note(text: str) -> None:
                show(Message(0, "line", {"text": text, "style": "dim"}))

            waits = waits_with(note) if wait else None
            # The process on the node locks the devices there.
            study, _ = stack.enter_context(take_turn((), names, database, wait=waits, note=note, is_taken=is_taken))
            store = store or stack.enter_context(open_store(storage))
            stack.enter_context(hold_lease(store, study, wait=waits))
            # By this name the same command, started again after it was killed, finds the study's actor.
            name = hashlib.sha256(f"{database}\0{study}".encode()).hexdigest()[:32]
            work = Work(name, study, asked.work_options(), code=asked.code, wait=wait)
            work = replace(work, kind="resume" if asked.resumes else "search")
            _record_to_the_end(engine, work, store, storage, (host, devices), show, asked)
            record = store.existing_study(study)
            return record, load_report(store, study)
    finally:
        engine.close()


def _request_here(asked: Asked, storage: str, devices: Sequence[Device]) -> SearchRequest:
    """Return the request for a search on the node's devices. Raises its errors before anything is started there."""
    if not asked.resumes:
        options = {**asked.work_options(), **({"gpus": str(len(devices))} if len(devices) > 1 else {})}
        request = search_request(options, devices, asked.study, asked.code)
        check_request(request)
        return request
    from autotune.tuning.studies import recorded_request

    with open_store(storage, create=False) as store:
        return recorded_request(store, str(asked.study), None, None, devices)


def _place(engine: RayEngine, options: Document) -> tuple[Host, tuple[Device, ...]]:
    """Return the node to search on and the devices to use: of the nodes with enough GPUs, one with the fewest.

    Raises ``ServiceError`` without a node, ``InvalidRequestError`` for wrong options, ``DeviceError`` without devices.
    """
    hosts = engine.hosts()
    if not hosts:
        why = "; ".join(dict.fromkeys(engine.problems())) or "the Ray cluster has no node"
        raise ServiceError(why, "install the same autotune on every node, in the environment that runs Ray there")
    device, gpus = options.get("device"), options.get("gpus")
    if device not in (None, "cpu", "cuda"):
        raise InvalidRequestError(
            f"--device {device}: Ray chooses the GPU of a cluster", "use --device cuda or cpu, or --gpus N"
        )
    if device is not None and gpus is not None:
        raise InvalidRequestError(
            f"--device {device} is one device, and --gpus {gpus} names others", "give one of the two"
        )
    if gpus is not None and gpus != "all" and not (str(gpus).isascii() and str(gpus).isdigit() and int(gpus)):
        raise InvalidRequestError(f"--gpus {gpus}: Ray chooses the GPUs of a cluster", "write how many: --gpus 2")
    most_gpus = max(map(_count_gpus, hosts))
    if device == "cpu" or (device is None and gpus is None and most_gpus == 0):
        without_gpus = [host for host in hosts if _count_gpus(host) == 0]
        if not without_gpus:
            raise DeviceError("every node of the Ray cluster has GPUs", "leave --device cpu out")
        return without_gpus[0], without_gpus[0].devices[:1]
    # Where no node has a GPU, ``all`` asks for one, so that the error says so.
    count = max(1, most_gpus) if gpus == "all" else int(gpus or 1)
    fitting = [host for host in hosts if _count_gpus(host) >= count]
    if not fitting:
        given = f"--gpus {gpus}" if gpus is not None else f"--device {device}"
        have = ", ".join(
            f"{host.name} ({_gpus_in_words(host)})" for host in sorted(hosts, key=_count_gpus, reverse=True)
        )
        raise DeviceError(
            f"{given}: no node of the Ray cluster has {plural(count, 'GPU')}; it has {have}",
            "ask for what one node has, or add a node",
        )
    host = min(fitting, key=_count_gpus)
    return host, host.devices[:count]


def _gpus_in_words(host: Host) -> str:
    count = _count_gpus(host)
    return f"{count} {host.devices[0].name}" if count else "no GPU"


def _count_gpus(host: Host) -> int:
    return sum(device.kind == "cuda" for device in host.devices)


def _record_to_the_end(
    engine: RayEngine,
    work: Work,
    store: Store,
    storage: str,
    place: tuple[Host, Sequence[Device]],
    show: Show,
    asked: Asked,
) -> None:
    """Run and record the search to its end, starting it again a few times where its node is lost; raise its error."""
    losses = 0
    while True:
        end = _record(_find_or_start(engine, work, store, place), store, storage, work.study, show)
        if end["state"] in ("finished", "interrupted"):
            return
        if end["state"] == "failed":
            problem = end.get("problem") or {}
            message, hint = str(problem.get("message") or "no reason was given"), str(problem.get("hint") or "")
            raise error_with_code(problem.get("exit_code"), message, hint) or AutotuneError(message, hint)
        losses += 1
        if losses == _MOST_LOSSES:
            raise TrialServerError(
                f"{losses} nodes were lost during the search, the last one: {end['why']}",
                "every trial is recorded; autotune resume goes on once the reason is known",
            )
        show(Message(0, "line", {"text": f"{end['why']}; the search goes on from what is recorded", "style": "dim"}))
        engine.refresh()
        place = _place(engine, asked.options)


def _find_or_start(engine: Engine, work: Work, store: Store, place: tuple[Host, Sequence[Device]]) -> Run:
    """Return the run of the work where an earlier command of ours started it, else start it at ``place``."""
    known = engine.find(work.id)
    if known is not None:
        return known
    host, devices = place
    studies = studies_for(store, work.study, work.options)
    return engine.start(replace(work, studies=studies, devices=tuple(device.uuid for device in devices)), host)


def _record(run: Run, store: Store, storage: str, study: str, show: Show) -> Document:
    """Write what a run sends to the database and the logs until its end; return the document of its end message.

    After Ctrl-C the run is cancelled, and its end awaited. Other messages are shown.
    """
    last_number, is_cancelled = 0, False
    interruption = Interruption()
    with contextlib.closing(run), interrupted_by_signals(interruption, lambda text: None):
        while True:
            # Only the first signal interrupts the statement that runs here. The search's end is awaited after it.
            with contextlib.suppress(KeyboardInterrupt):
                if interruption.asked and not is_cancelled:
                    is_cancelled = True
                    run.cancel()
                for message in run.messages(last_number, _LISTEN_SECONDS):
                    if message.kind == "record":
                        take_in_study(store, message.document, study)
                    elif message.kind == "log":
                        # A search goes on where a log cannot be written.
                        with contextlib.suppress(OSError):
                            keep_trial_log(storage, study, message.document)
                    elif message.kind == "end":
                        return message.document
                    else:
                        show(message)
                    last_number = message.number
