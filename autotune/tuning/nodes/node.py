"""Serve one search on the machine that has the GPUs: describe that machine, and run trials.

This is the node's side. It does what the searching process does itself for a search on its own machine: it holds the
devices, starts trial servers, inspects, reads data, and watches the GPUs while trials run. It knows nothing of how
questions reach it: ``Node.ask`` takes and returns plain data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from autotune import __version__
from autotune.core.candidate import Arm, Document
from autotune.core.device import CPU_UUID
from autotune.core.errors import AutotuneError, InvalidRequestError
from autotune.core.inspection import Software
from autotune.core.outcome import outcome_document
from autotune.core.placement import Placement, this_host
from autotune.core.prediction import ArmsToTrace, PredictionWork
from autotune.core.schema import decode, encode
from autotune.core.workload import Workload
from autotune.devices import Device, list_devices, nvml_problem
from autotune.devices.presence import Presence
from autotune.execution import Event, Executor, LocalExecutor, TrialJob, TrialServer
from autotune.execution.gpu_monitor import SharedExecutor, WatchedExecutor
from autotune.space.features import version_of
from autotune.tuning.answer_cache import PACKAGES, code_digest, inspection_key, prediction_key
from autotune.tuning.environment import describe_environment
from autotune.tuning.exclusive import take_turn
from autotune.tuning.machine import ThisMachine
from autotune.tuning.nodes.messages import NodeFacts, NodeReport, Opened, Opening, Problem, Reply

# Of each log the end, which says what went wrong; a training script may write without limit.
_MOST_LOG_BYTES = 256 * 1024
# Reports of steps are gathered for so long, so that messages do not disturb the trial.
_GATHER_SECONDS = 0.2
# Followed by the process that made it.
_FOLDER_PREFIX = "autotune-node-"
# Ray's launcher puts its own copies of libraries first among the folders of modules.
_RAY_FOLDERS = ("ray/thirdparty_files", "ray/_private/workers")

T = TypeVar("T")


def this_code() -> str:
    """Return a digest of all modules of this package: two sides understand each other where it is equal."""
    return code_digest("**/*.py")


class Node:
    """Answers the questions of one search, one at a time."""

    def __init__(self) -> None:
        _forget_launcher()
        self._stack = contextlib.ExitStack()
        self._notes: list[str] = []
        self._folder: Path | None = None
        self._placements: tuple[Placement, ...] = ()
        self._servers: list[TrialServer] = []
        self._presence: Presence | None = None
        self._local: LocalExecutor | None = None
        self._executor: Executor | None = None
        self._sent: dict[str, tuple[int, int]] = {}

    def ask(self, question: str, document: Document) -> Document:
        """Answer a question; an error that the user can act on is a reply, too."""
        answer_to: Callable[..., Any] = getattr(self, f"_answer_{question}")
        answer, problem = None, None
        try:
            answer = answer_to(**document)
        except AutotuneError as error:
            problem = Problem(error.exit_code, error.message, error.hint)
        notes, self._notes = tuple(self._notes), []
        # What a running trial writes is sent with its outcome.
        is_quiet = question == "wait" and problem is None and not any(report["outcome"] for report in answer or ())
        reply: Document = encode(Reply(answer, problem, notes, None if is_quiet else self._new_logs()))
        return reply

    # Before the search

    def _answer_facts(self) -> Document:
        packages = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
        facts = NodeFacts(this_host(), __version__, this_code(), list_devices(), packages, nvml_problem())
        document: Document = encode(facts)
        return document

    def _answer_open(self, opening: Document) -> Document:
        """Take the devices for a search and prepare trial servers, which start when they are needed."""
        self.close()
        told = decode(opening, Opening)
        workload = Workload.from_document(told.workload)
        with contextlib.ExitStack() as stack:
            folder = self._make_folder(stack)
            with contextlib.suppress(OSError):
                os.chdir(told.cwd)
            _check_files(workload)
            known = {device.uuid: device for device in list_devices()}
            self._placements = tuple(Placement.of(*(known[uuid] for uuid in uuids)) for uuids in told.slots)
            devices = [device for placement in self._placements for device in placement.devices]
            # Where the search runs, the study is held there; the name is for who waits for a device.
            turn = take_turn(devices, told.study, str(folder), wait=told.wait, note=self._notes.append)
            stack.enter_context(turn)
            self._presence = stack.enter_context(Presence(devices[0].uuid))
            for uuid in {device.uuid for device in devices} - {devices[0].uuid}:
                stack.enter_context(Presence(uuid))
            self._servers = []
            for number, placement in enumerate(self._placements):
                logs = folder if number == 0 else folder / f"server-{number}"
                server = TrialServer(placement, workload, logs, self._say_start(placement.devices[0], placement.label))
                self._servers.append(stack.enter_context(server))
            self._stack = stack.pop_all()
        opened: Document = encode(Opened(str(folder)))
        return opened

    def _make_folder(self, stack: contextlib.ExitStack) -> Path:
        _remove_abandoned()
        parent = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-"))
        stack.callback(shutil.rmtree, parent, ignore_errors=True)
        self._folder = parent / "logs"
        self._folder.mkdir()
        self._sent = {}
        return self._folder

    def _say_start(self, device: Device, label: str) -> Callable[[], None]:
        said = f"starting a process for trials on {label} of {this_host()} ({device.name}) …"
        return lambda: self._notes.append(said)

    def _answer_start(self, inspects: bool) -> None:
        for number, server in enumerate(self._servers):
            server.start(inspects=inspects and number == 0)

    def _answer_read_data(self) -> Document:
        assert self._folder is not None
        for server in self._servers:
            folder = server.workload.data_folder(self._folder.parent)
            server.read_data(folder)
        return self._servers[0].workload.document()

    def _answer_inspect(self, timeout_seconds: float | None, arms: Document | None) -> Document:
        to_trace = decode(arms, ArmsToTrace) if arms is not None else None
        limit = {} if timeout_seconds is None else {"timeout_seconds": timeout_seconds}
        found: Document = encode(self._servers[0].inspect(**limit, arms=to_trace))
        return found

    def _answer_run_as_inspected(self, workload: Document) -> None:
        for server in self._servers:
            server.run_as_inspected(Workload.from_document(workload))

    # What the machine is

    def _answer_environment(
        self, workload: Document, arms: list[Document], software: Document, measurement_revision: int
    ) -> Document:
        known = [decode(arm, Arm) for arm in arms]
        read = decode(software, Software)
        placement = self._placements[0]
        return describe_environment(placement, Workload.from_document(workload), known, read, measurement_revision)

    def _answer_inspection_key(self, workload: Document) -> str | None:
        placement = self._placements[0]
        return inspection_key(placement.device, Workload.from_document(workload), placement.ranks)

    def _answer_prediction_key(self, identity: Document, workload: Document) -> str:
        return prediction_key(decode(identity, PredictionWork), Workload.from_document(workload))

    def _answer_free_host_bytes(self) -> int | None:
        return ThisMachine().free_host_bytes()

    # Predictions beside the trials

    def _answer_predict(self, job_id: str, work: Document, timeout_seconds: float) -> None:
        self._servers[0].submit(job_id, decode(work, PredictionWork), timeout_seconds)

    def _answer_predicted(self, wait_seconds: float) -> Document:
        ended = self._servers[0].ended(wait_seconds)
        return {job_id: encode(answer) for job_id, answer in ended.items()}

    # Trials

    def _answer_run_trials(self, context_bytes: int) -> None:
        """Begin to take trials; one that was under way before is ended."""
        if self._executor is not None:
            self._executor.close()
        self._local = LocalExecutor(self._servers)
        if self._placements[0].device.uuid == CPU_UUID:
            assert self._presence is not None
            self._executor = SharedExecutor(self._local, self._presence)
        else:
            self._executor = WatchedExecutor(self._local, context_bytes, self._notes.append)

    def _answer_submit(self, job: Document, slot: int) -> None:
        assert self._executor is not None
        assert self._folder is not None
        document = {**job, "placement": None, "log_path": str(self._folder / Path(job["log_path"]).name)}
        trial = decode(document, TrialJob)
        self._executor.submit(dataclasses.replace(trial, placement=self._servers[slot].placement))

    def _answer_wait(self, seconds: float) -> list[Document]:
        """Return what trials said and how they ended, waiting at most so long for the first of it."""
        assert self._executor is not None
        assert self._local is not None
        reports: list[NodeReport] = []
        deadline = time.monotonic() + seconds
        while self._local.listen(max(0.0, deadline - time.monotonic())):
            trial_id, report = self._executor.wait()
            if not isinstance(report, Event):
                reports.append(NodeReport(trial_id, outcome=outcome_document(report)))
                break
            reports.append(NodeReport(trial_id, report.progress))
            if len(reports) == 1:
                deadline = min(deadline, time.monotonic() + _GATHER_SECONDS)
        return [encode(report) for report in reports]

    def _answer_stop(self) -> None:
        """End the trials under way."""
        if self._executor is not None:
            self._executor.close()

    def _answer_close(self) -> None:
        self.close()

    def close(self) -> None:
        """End every process, give the devices back, and remove every file; the last logs are lost with them."""
        self._local = self._executor = None
        self._servers, self._folder = [], None
        self._stack.close()

    def _new_logs(self) -> dict[str, str]:
        """Return the ends of the logs that have changed since they were sent the last time, by name."""
        found = {}
        for path in sorted(self._folder.rglob("*.log")) if self._folder is not None else ():
            name = str(path.relative_to(self._folder or path))
            with contextlib.suppress(OSError):
                status = path.stat()
                state = (status.st_size, status.st_mtime_ns)
                if self._sent.get(name) == state:
                    continue
                self._sent[name] = state
                with open(path, "rb") as log:
                    log.seek(max(0, status.st_size - _MOST_LOG_BYTES))
                    found[name] = log.read().decode(errors="replace")
        return found


def _remove_abandoned() -> None:
    """Remove the folders of nodes whose processes were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _check_files(workload: Workload) -> None:
    """Raise ``InvalidRequestError`` where the user's code or data is not on this node, or is another."""
    source, data = workload.source, workload.data
    where = f"put it under the same path on every node, for example on a shared file system; it is not on {this_host()}"
    if source is not None:
        if not Path(source.file).is_file():
            raise InvalidRequestError(f"{source.file} is not on the node {this_host()}", where)
        if source.as_it_is_now().digest != source.digest:
            raise InvalidRequestError(
                f"{source.file} differs on the node {this_host()}", "make it the same on every node"
            )
    if data is not None and os.path.isabs(data.source) and not os.path.lexists(data.source):
        raise InvalidRequestError(f"{data.source} is not on the node {this_host()}", where)


def _forget_launcher() -> None:
    """Undo what a launcher did to this process, so that trials run as they would without it.

    Ray sets ``OMP_NUM_THREADS`` to the cores that an actor reserved, 1 for none, where its own process (the raylet)
    has not got it.
    """
    raylet = os.environ.get("RAY_RAYLET_PID")
    if raylet is None:
        return
    with contextlib.suppress(OSError):
        if b"OMP_NUM_THREADS=" not in Path(f"/proc/{raylet}/environ").read_bytes():
            os.environ.pop("OMP_NUM_THREADS", None)
    sys.path[:] = [folder for folder in sys.path if not folder.endswith(_RAY_FOLDERS)]
