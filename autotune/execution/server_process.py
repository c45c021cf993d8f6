"""Start the trial server's process or take one that is kept ready, exchange messages with it, and end it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.core.candidate import Document
from autotune.core.errors import TrialServerError
from autotune.core.messages import (
    Adopted,
    Answer,
    Ended,
    ImportFailed,
    Job,
    Progress,
    ProgressLine,
    Ready,
    ServerLine,
    Started,
    server_line,
)
from autotune.core.pipes import wait_until_ready
from autotune.core.placement import Placement
from autotune.core.prediction import PredictionWork
from autotune.core.scratch import Scratch, private_opener
from autotune.core.signals import signals_delayed
from autotune.core.workload import Workload
from autotune.execution.child_process import ChildProcess, server_environment, tail
from autotune.execution.oneshot import GpuInspection
from autotune.space.features import version_of

# How long a server may take to end what it runs once its pipe is closed; it needs milliseconds.
LEAVE_SECONDS = 10.0
# Packages that a server has loaded: after an upgrade it would mix two versions of them.
_LOADED = ("torch", "transformers", "accelerate", "datasets", "peft")

Imports = tuple[object, ...]
"""What a server has imported, from which versions and in which environment; an equal one can serve another search."""


def _imports_for(workload: Workload | None, environment: Mapping[str, str]) -> Imports | None:
    """Return what a server imports for a workload; ``None`` for the user's own code, which may need any package.

    A server without a ``workload`` is ready for one without dataset and adapters.
    """
    if workload is None:
        return False, False, dict(environment), _loaded_versions()
    if workload.source is not None:
        return None
    has_adapters = bool(workload.peft or workload.quantize)
    return workload.data is not None, has_adapters, dict(environment), _loaded_versions()


def _loaded_versions() -> tuple[str | None, ...]:
    return tuple(version_of(package) for package in _LOADED)


class StartedServer(ChildProcess):
    """The process of a trial server, which waits to be told its workload."""

    def __init__(self, log_path: Path, environment: Mapping[str, str], imports: Imports | None) -> None:
        """Start the process, which then has these ``imports``. Raises ``OSError`` where none can be started."""
        with open(log_path, "ab", opener=private_opener) as log:
            super().__init__("autotune.worker.server", log, environment)
        self.imports = imports
        self.is_ready = False
        """Whether it can take jobs: its imports are done."""

    def leave(self) -> None:
        """End the process and all its jobs."""
        # Before its imports are done the server runs no job, and would notice the closed pipe only after them.
        self.end(LEAVE_SECONDS if self.is_ready else 0.0)


class WarmServer:
    """A context manager that keeps at most one idle server, and the inspections of GPUs. Leaving ends both.

    An idle server has imported torch and transformers and nothing else: it has never touched CUDA (the server ends
    itself where an import did), so it holds host memory and no GPU memory.
    """

    def __init__(self) -> None:
        self._idle: StartedServer | None = None
        self._inspections: dict[tuple[str, bool, tuple[str | None, ...]], GpuInspection] = {}

    def __enter__(self) -> WarmServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id of the idle server."""
        return self._idle.pid if self._idle is not None else None

    def prepare(self, placement: Placement, environment: Mapping[str, str]) -> None:
        """Start a server for the next search, unless one is idle, with the imports of most workloads.

        The GPU is inspected at the same time. Where no process can be started, the next search reports why.
        """
        with contextlib.suppress(TrialServerError):
            self.inspection(placement, convolves=False).begin()
        if self._idle is not None and self._idle.is_alive:
            return
        self._end_idle()
        variables = server_environment(placement, environment, offline=True)
        with contextlib.suppress(OSError):
            with signals_delayed():
                self._idle = StartedServer(Path(os.devnull), variables, _imports_for(None, variables))
            self._idle.send({"workload": None, "is_plain": True}, time.monotonic() + LEAVE_SECONDS)

    def inspection(self, placement: Placement, *, convolves: bool) -> GpuInspection:
        """Return the inspection of the GPU, with or without convolution kernels; it may have begun."""
        key = (placement.device.uuid, convolves, _loaded_versions())
        return self._inspections.setdefault(key, GpuInspection(placement, convolves))

    def take(self, imports: Imports | None) -> StartedServer | None:
        """Return the idle server if its imports match; otherwise end it and return ``None``."""
        idle, self._idle = self._idle, None
        if idle is not None and (imports is None or idle.imports != imports or not idle.is_alive):
            idle.leave()
            return None
        return idle

    def keep(self, server: StartedServer) -> None:
        """Keep an idle server; end it where no other search can use its imports."""
        if server.imports is None or not server.is_alive:
            server.leave()
            return
        self._end_idle()
        self._idle = server

    def close(self) -> None:
        """End the idle server and running inspections."""
        for inspection in self._inspections.values():
            inspection.close()
        self._end_idle()

    def _end_idle(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.leave()


# The server ends a job at its time limit; the controller stops waiting for the server a little later.
_GRACE_SECONDS = 20.0
# Importing torch and transformers took 4 s on a laptop's disk, 11 s on a cold network disk; minutes mean trouble.
_START_SECONDS = 300.0


def _how_to_start(error: OSError) -> str:
    """Return what the user can do about the ``error`` with which a process could not be started."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "close some of the files that are open, or raise the limit: ulimit -n"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return "end other processes, or raise the limits of processes and memory: ulimit -u, ulimit -v"
    if error.errno == errno.E2BIG:
        return "the environment variables are too long: unset the longest of them"
    return f"see whether {error.filename or sys.executable} can be used, and whether there is room"


def _import_error(failed: ImportFailed) -> TrialServerError:
    """Return the error for a server that cannot import what it needs, with the advice for the package at fault."""
    hint = "install torch and transformers into the environment that runs autotune"
    if (package := failed.package) is not None:
        hint = f"install another version of {package}, or remove it; python -c 'import {package}' shows the error"
    return TrialServerError(f"the trial server cannot import what it needs: {failed.import_error}", hint)


@dataclass
class SentJob:
    """A job that was sent to the server, until its answer is fetched."""

    job: Job
    deadline: float
    """The ``time.monotonic`` from which a silent server is given up."""
    started: Started | None = None
    """Its processes and its folder, once it has any."""
    during: str = ""
    """The phase that it entered last."""
    progress: deque[Progress] = field(default_factory=deque)
    """The progress reports that were not fetched yet."""
    answer: Answer | None = None
    """``None`` while it runs."""

    @property
    def is_prediction(self) -> bool:
        """Whether it predicts memory: it may run beside a trial, and whoever waits for it sets a limit."""
        return isinstance(self.job.work, PredictionWork)


class ServerProcess:
    """The process of a trial server, with the jobs that were sent to it. It is started again if it dies between jobs.

    Where ``on_start`` is given, the process starts when it is first needed, and ``on_start`` is called then. An idle
    server of ``warm`` is taken instead of a start where it has the right imports, and goes back there at the end.
    """

    def __init__(
        self,
        placement: Placement,
        workload: Workload,
        log_folder: Path,
        on_start: Callable[[], None] | None = None,
        warm: WarmServer | None = None,
    ) -> None:
        self.placement = placement
        self.workload = workload
        """It gets the facts of its dataset once that was read."""
        self.server_log = log_folder / "server.log"
        """Where the server's own output goes."""
        self._on_start = on_start
        self._warm = warm
        self._server: StartedServer | None = None
        self._was_idle = False
        """Whether the process came from ``warm``, so that it was started for no workload or another one."""
        self._jobs: dict[str, SentJob] = {}

    @property
    def fd(self) -> int | None:
        """The file descriptor of the server's messages; ``None`` without a process."""
        return self._server.reports.fd if self._server is not None else None

    def pids_of(self, job_id: str) -> tuple[int, ...]:
        """Return the process ids of a running job, in the order of its ranks; an empty tuple otherwise."""
        sent = self._jobs.get(job_id)
        return sent.started.pids if sent is not None and sent.started is not None and sent.answer is None else ()

    def start_process(self) -> None:
        """Start the process, or take the idle one of ``warm``. Its imports overlap with the caller's next work.

        Raises ``TrialServerError`` where no process can be started.
        """
        environment = self._environment()
        # Reading versions takes milliseconds, and only a search that may leave its server to the next one needs them.
        imports = _imports_for(self.workload, environment) if self._warm is not None else None
        self._server = self._warm.take(imports) if self._warm is not None else None
        self._was_idle = self._server is not None
        on_start, self._on_start = self._on_start, None
        if self._server is None:
            if on_start is not None:
                on_start()
            try:
                with signals_delayed():
                    self._server = StartedServer(self.server_log, environment, imports)
            except OSError as error:
                raise TrialServerError(
                    f"no process for trials can be started: {error.strerror or error}", _how_to_start(error)
                ) from error
        elif not self._server.is_ready:
            # ``await_ready`` sends the workload once the server is ready.
            return
        self._server.is_ready = False
        self._tell_workload()

    def _tell_workload(self) -> None:
        """Send the workload to the process; one that was idle also gets the path of its log."""
        message: Document = {"workload": self.workload.document()}
        if self._was_idle:
            message["log_path"] = str(self.server_log.absolute())
        # As a line rather than an argument, which may not be longer than 128 KiB on Linux. Where the server ends before
        # it has read the line, ``await_ready`` notices.
        self.send(message, time.monotonic() + _START_SECONDS)

    def _environment(self) -> dict[str, str]:
        """Return the environment of the server: offline unless weights, a dataset or own code may need the network."""
        own_code = self.workload.source is not None
        needs_hub = self.workload.weights is not None or self.workload.data is not None
        return server_environment(self.placement, os.environ, offline=not needs_hub and not own_code, own_code=own_code)

    def await_ready(self) -> None:
        """Wait until the server can take jobs.

        It is started where there is none, and again where it died between two jobs. Raises ``TrialServerError`` where
        its imports fail, and where it ends or is not ready in time.
        """
        if self._server is not None and self._server.is_ready and not self._server.is_alive:
            self.close()
        if self._server is None:
            self.start_process()
        deadline = time.monotonic() + _START_SECONDS
        was_replaced = False
        while self._server is not None and not self._server.is_ready:
            messages = self.read(deadline)
            # ``None`` means that the server has ended.
            if messages is None and (self._was_idle or (not was_replaced and self._was_killed())):
                # An idle server may have ended because of earlier searches, so that a new one is started. A new one
                # that a signal killed is started again once.
                was_replaced |= not self._was_idle
                self.close()
                self.start_process()
                continue
            if messages is None or time.monotonic() > deadline:
                self.close()
                raise TrialServerError(
                    f"the trial server did not start: {tail(self.server_log) or 'it said nothing'}",
                    f"its output is in {self.server_log}",
                )
            for line in messages:
                if isinstance(line, ImportFailed):
                    self.close()
                    raise _import_error(line)
                if isinstance(line, Ready) and self._was_idle:
                    # It was taken while it still imported. It answers the workload with ``Adopted``.
                    self._tell_workload()
                elif isinstance(line, Ready | Adopted):
                    self._server.is_ready = True

    def _was_killed(self) -> bool:
        """Return whether a signal killed the server, so that a new process may work."""
        assert self._server is not None
        return (self._server.wait(LEAVE_SECONDS) or 0) < 0

    def send(self, message: Document, deadline: float) -> bool:
        """Send a line. Return ``False`` where the server is gone or does not read before the deadline."""
        assert self._server is not None
        return self._server.send(message, deadline)

    def read(self, deadline: float) -> list[ServerLine] | None:
        """Return the server's new messages, after adding each to its job; ``None`` once the server is gone.

        Waits for one until ``deadline``, a time of ``time.monotonic``, and returns an empty list after it.
        """
        assert self._server is not None
        reports = self._server.reports
        if not wait_until_ready([reports.fd], timeout_seconds=max(0.0, deadline - time.monotonic())):
            return []
        lines = reports.read()
        # A closed pipe counts as the server's end only once all it wrote was read.
        if not lines and reports.closed:
            return None
        messages = [server_line(json.loads(line)) for line in lines]
        for message in messages:
            self._take(message)
        return messages

    def _take(self, message: ServerLine) -> None:
        """Add a message to its job; drop the messages of unknown jobs and of jobs that have an answer, as lost ones."""
        match message:
            case Started(job_id) | ProgressLine(_, job_id) | Ended(job_id):
                sent = self._jobs.get(job_id)
            case _:
                return
        if sent is None or sent.answer is not None:
            return
        match message:
            case Started():
                sent.started = message
            case ProgressLine(progress):
                sent.during = progress.phase or sent.during
                sent.progress.append(progress)
            case Ended(_, answer):
                sent.answer = replace(answer, during=sent.during)

    def begin(self, job: Job) -> None:
        """Send a job to the server, after its imports, without waiting for the job's end."""
        self.await_ready()
        deadline = time.monotonic() + job.timeout_seconds + _GRACE_SECONDS
        self._jobs[job.id] = SentJob(job, deadline)
        if not self.send({"job": job.document()}, deadline):
            self.close()

    def seconds_left(self) -> float | None:
        """Return the seconds to the earliest deadline of a running job, predictions aside; ``None`` without one."""
        deadlines = [sent.deadline for sent in self._jobs.values() if sent.answer is None and not sent.is_prediction]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def listen(self, wait_seconds: float | None) -> bool:
        """Add messages of the server to their jobs, waiting for one at most ``wait_seconds``; return if any came.

        ``None`` does not wait. A server that is gone, or silent beyond the time limit of a job, loses all its jobs.
        """
        if self._server is None or all(sent.answer is not None for sent in self._jobs.values()):
            return False
        messages = self.read(time.monotonic() + (wait_seconds or 0.0))
        if messages is None:
            self.close()
        elif not messages and self.seconds_left() == 0:
            self.close(overdue=True)
        return bool(messages)

    def progress_of(self, job_id: str) -> Progress | None:
        """Return the oldest progress report of a job that was not returned yet; ``None`` without one."""
        progress = self._jobs[job_id].progress
        return progress.popleft() if progress else None

    def end_of(self, job_id: str) -> Answer | None:
        """Return a job's answer and forget the job; ``None`` while it runs, or has unread progress reports."""
        sent = self._jobs[job_id]
        return self._jobs.pop(job_id).answer if sent.answer is not None and not sent.progress else None

    def run_to_end(self, job: Job) -> Answer:
        """Run a job, wait for its end and return its answer."""
        self.begin(job)
        try:
            while (answer := self.end_of(job.id)) is None:
                self._jobs[job.id].progress.clear()
                self.listen(self.seconds_left())
        except BaseException:
            # A caller that is interrupted must not leave the job running beside the next one.
            self.close()
            self._jobs.pop(job.id, None)
            raise
        return answer

    def release(self) -> None:
        """Hand the server back to ``warm`` for the next search; end it where it is busy, or there is no ``warm``."""
        server = self._server
        is_busy = any(sent.answer is None for sent in self._jobs.values())
        if self._warm is None or server is None or not server.is_ready or is_busy:
            self.close()
            return
        self._server = None
        self._warm.keep(server)

    def close(self, *, overdue: bool = False) -> None:
        """End the server and all its jobs, with their processes and files. The next job starts a new server.

        Running jobs are lost; ``overdue`` says in their answers that the server had not answered in time.
        """
        server, self._server = self._server, None
        if server is not None:
            server.leave()
        for sent in self._jobs.values():
            if sent.answer is not None:
                continue
            sent.answer = Answer(during=sent.during, lost=True, overdue=overdue)
            if sent.started is not None:
                # A server that was killed leaves its jobs' processes and files behind.
                for pid in sent.started.pids:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
                Scratch(sent.started.folder).remove()
