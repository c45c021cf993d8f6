"""Trials as local processes, forked by a warm server process of which this is the only client."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from autotune.core.candidate import Candidate, Document
from autotune.core.dataset_folder import HeldData, hold_data
from autotune.core.errors import InvalidRequestError, TrialServerError
from autotune.core.outcome import Effort, Failed, Outcome, OutOfMemory
from autotune.core.pipes import LineReader, wait_until_ready, write_all
from autotune.core.workload import Workload
from autotune.devices import Device
from autotune.devices.host import oom_kills
from autotune.execution import launch
from autotune.execution.gpu_inspection import GpuInspection, merged
from autotune.execution.process_environment import server_environment
from autotune.execution.process_outcome import check_own_code, how_it_ended, outcome_of, tail
from autotune.models.dataset_files import check_unchanged

Progress = Callable[[Document], None]

# Importing torch and transformers took 4 s on a laptop's disk, 11 s on a cold network disk; minutes mean trouble.
_START_SECONDS = 300.0
# The server ends a trial at its time limit; the controller stops waiting for the server a little later.
_GRACE_SECONDS = 20.0
_INSPECT_SECONDS = 180.0
# A core tokenizes a few thousand samples a second; an hour is for tens of millions of them.
_READ_DATA_SECONDS = 3600.0
# How long a server may take to end what it runs once its pipe is closed; it needs milliseconds.
_LEAVE_SECONDS = 10.0


def _how_to_start(error: OSError) -> str:
    """What to do about a process that could not be started."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "close some of the files that are open, or raise the limit: ulimit -n"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return "end other processes, or raise the limits of processes and memory: ulimit -u, ulimit -v"
    if error.errno == errno.E2BIG:
        return "the environment variables are too long: unset the longest of them"
    return f"see whether {error.filename or sys.executable} can be used, and whether there is room"


@dataclass(frozen=True)
class TrialJob:
    """All that a trial process needs to know."""

    trial_id: str
    candidate: Candidate
    cap_bytes: int
    effort: Effort
    seed: int
    timeout_seconds: float
    log_path: str
    unmodified: bool = False
    """Run the user's own code with its own settings, whatever the candidate says."""


class LocalRunner:
    """A context manager that owns the server, and with it every trial process.

    The server starts on entering, in the background, so that its imports overlap with whatever
    the caller does next; the first job waits for it. It is started again if it dies. Where ``on_start``
    is given, the server starts with the first job, and ``on_start`` is called then.
    """

    def __init__(
        self, device: Device, workload: Workload, log_folder: Path, on_start: Callable[[], None] | None = None
    ) -> None:
        self._on_start = on_start
        self._device = device
        self._workload = workload
        self._log_folder = log_folder
        self._server: subprocess.Popen[bytes] | None = None
        self._reports: LineReader | None = None
        self._ready = False
        # Of jobs that have not ended, by their ids.
        self._folders: dict[str, str] = {}
        self._trial_pid: int | None = None
        self._data: HeldData | None = None
        self._gpu = GpuInspection(device, workload, log_folder)
        self._submitted: dict[str, Document] = {}
        self._ended: dict[str, Document] = {}

    def __enter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        if self._on_start is None:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gpu.close()
        self.close()
        if self._data is not None:
            self._data.release()
            self._data = None

    @property
    def trial_pid(self) -> int | None:
        """The process of the running trial, where there is one."""
        return self._trial_pid

    @property
    def server_log(self) -> Path:
        """Where the server's own output goes."""
        return self._log_folder / "server.log"

    def start(self, *, inspects: bool = False) -> None:
        """Start the server, unless that is done: its imports overlap with whatever the caller does next.

        With ``inspects``, what ``inspect`` needs of the GPU is found out beside them.
        """
        if self._server is None:
            self._start()
        if inspects:
            self._gpu.begin()

    def _start(self) -> None:
        on_start, self._on_start = self._on_start, None
        if on_start is not None:
            on_start()
        try:
            self._server, read_fd = self._popen()
        except OSError as error:
            raise TrialServerError(
                f"no process for trials can be started: {error.strerror or error}", _how_to_start(error)
            ) from error
        self._reports, self._ready, self._trial_pid = LineReader(read_fd), False, None
        try:
            # As a line rather than an argument, which may not be longer than 128 KiB on Linux. A server that ends
            # before it has read it is noticed by whoever waits for it.
            self._write({"workload": self._workload.document()}, time.monotonic() + _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _popen(self) -> tuple[subprocess.Popen[bytes], int]:
        """Start the server's process; also the end of the pipe from which its messages are read."""
        read_fd, write_fd = os.pipe()
        try:
            with open(self.server_log, "ab") as log:
                server = launch.start_module("autotune.worker.server", write_fd, log, self._environment())
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        assert server.stdin is not None
        os.set_blocking(server.stdin.fileno(), False)
        return server, read_fd

    def _write(self, message: Document, deadline: float) -> bool:
        """Send a line to the server; ``False`` where it is gone or does not read."""
        assert self._server is not None
        assert self._server.stdin is not None
        return write_all(self._server.stdin.fileno(), json.dumps(message).encode() + b"\n", deadline)

    def _environment(self) -> dict[str, str]:
        own_code = self._workload.source is not None
        offline = not self._needs_hub() and not own_code
        return server_environment(self._device, os.environ, offline=offline, own_code=own_code)

    def _needs_hub(self) -> bool:
        return self._workload.weights is not None or self._workload.data is not None

    def close(self) -> None:
        """End the server and whatever it runs; leaves no process behind."""
        server, self._server = self._server, None
        if server is None:
            return
        if not self._ready:
            # It runs nothing yet, and would only hear of the closed pipe once its imports are done.
            server.kill()
        if server.stdin:
            with contextlib.suppress(OSError):
                server.stdin.close()
        try:
            server.wait(timeout=_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if self._trial_pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._trial_pid, signal.SIGKILL)
        if self._reports is not None:
            os.close(self._reports.fd)
            self._reports = None
        # A server that was killed has removed none of them.
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        self._folders.clear()
        # Nobody will report their ends any more.
        self._ended.update(self._submitted)
        self._submitted = {}

    def _read(self, deadline: float) -> list[Document] | None:
        """Messages that have come; waits for some until ``deadline``; ``None`` once the server is gone."""
        assert self._reports is not None
        if not wait_until_ready([self._reports.fd], timeout_seconds=max(0.0, deadline - time.monotonic())):
            return []
        lines = self._reports.read()
        if not lines and self._reports.closed:
            return None
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if "started" in message:
                self._folders[message["started"]] = message["folder"]
            elif "ended" in message:
                self._folders.pop(message["ended"], None)
        return messages

    def _await_ready(self) -> None:
        """Block until the server's imports are done; ``TrialServerError`` where they fail."""
        if self._server is not None and self._server.poll() is not None and self._ready:
            # It died between two jobs: none of them is lost by that.
            self.close()
        if self._server is None:
            self._start()
        deadline = time.monotonic() + _START_SECONDS
        was_killed = False
        while not self._ready:
            messages = self._read(deadline)
            if messages is None and not was_killed and self._was_killed():
                was_killed = True
                self.close()
                self._start()
                continue
            if messages is None or time.monotonic() > deadline:
                self.close()
                raise TrialServerError(
                    f"the trial server did not start: {tail(self.server_log) or 'it said nothing'}",
                    f"its output is in {self.server_log}",
                )
            for message in messages:
                if "import_error" in message:
                    self.close()
                    raise TrialServerError(
                        f"the trial server cannot import what it needs: {message['import_error']}",
                        "install torch and transformers into the environment that runs autotune",
                    )
                self._ready = self._ready or "ready" in message

    def _was_killed(self) -> bool:
        """Whether a signal ended the server, which says nothing against another one."""
        assert self._server is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._server.wait(timeout=_LEAVE_SECONDS) < 0
        return False

    def _run_job(self, job: Document, progress: Progress) -> Document:
        """Send a job, wait for its end; ``result`` (if any) and how the process ended, as one document."""
        self._await_ready()
        try:
            return self._await_end(job, progress) if self._send(job) else {"lost": True}
        except BaseException:
            # Who stops waiting for a job must not leave it running beside the next.
            self.close()
            raise

    def _send(self, job: Document) -> bool:
        """Hand a job to the server; whether it is there to take it."""
        if not self._write({"job": job}, time.monotonic() + job["timeout_seconds"] + _GRACE_SECONDS):
            self.close()
            return False
        return True

    def _await_end(self, job: Document, progress: Progress) -> Document:
        deadline = time.monotonic() + job["timeout_seconds"] + _GRACE_SECONDS
        answer: Document = {}
        while True:
            messages = self._read(deadline)
            if messages is None or (not messages and time.monotonic() > deadline):
                self.close()
                return {**answer, "lost": True, "overdue": messages is not None}
            for message in messages:
                if message.get("started") == job["id"]:
                    self._trial_pid = message["pid"]
                elif message.get("ended") == job["id"]:
                    self._trial_pid = None
                    return {**answer, **message}
                elif message.get("id") != job["id"]:
                    self._note_submitted(message)
                elif "progress" in message:
                    answer["during"] = message["progress"].get("phase", answer.get("during", ""))
                    progress(message["progress"])
                else:
                    answer.update(message)

    def submit(self, job_id: str, kind: str, details: Document, timeout_seconds: float) -> None:
        """Start a job beside the trials, once the server's imports are done, and do not wait; see ``ended``."""
        self._await_ready()
        job = {
            "id": job_id,
            "kind": kind,
            "workload": self._workload.document(),
            "timeout_seconds": timeout_seconds,
            "log_path": str(self._log_folder / f"{kind}-{job_id}.log"),
            **details,
        }
        self._submitted[job_id] = {}
        if not self._send(job):
            self._ended[job_id] = self._submitted.pop(job_id)

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Document]:
        """Submitted jobs that have ended since the last call; ``result`` is in what each said if it got that far."""
        deadline = time.monotonic() + wait_seconds
        while self._submitted and self._server is not None:
            messages = self._read(deadline)
            if messages is None:
                self.close()
            for message in messages or ():
                self._note_submitted(message)
            if not messages or self._ended:
                break
        ended, self._ended = self._ended, {}
        return ended

    def _note_submitted(self, message: Document) -> None:
        job_id = message.get("ended") or message.get("id")
        if job_id not in self._submitted:
            return
        if "ended" in message:
            self._ended[job_id] = {**self._submitted.pop(job_id), **message}
        elif "result" in message:
            self._submitted[job_id].update(message)

    def _device_facts(self) -> Document:
        return {"device_kind": self._device.kind, "device_uuid": self._device.uuid}

    def read_data(self, folder: Path) -> Workload:
        """Read the workload's data into ``folder``, from which trials then map it; the workload with its facts.

        Raises ``InvalidRequestError`` where the data is no good, ``TrialServerError`` when no answer comes.
        """
        held = hold_data(folder)
        if held is None:
            self._read_anew(folder)
            held = hold_data(folder)
        if held is None:
            raise TrialServerError(
                f"the data that was read into {folder} is gone again", "see who removes it, then search once more"
            )
        self._data = held
        self._workload = self._workload.with_facts(held.facts)
        return self._workload

    def discard_data(self) -> None:
        """Remove the data that was read, unless another search uses it."""
        if self._data is not None:
            self._data.discard()

    def _read_anew(self, folder: Path) -> None:
        assert self._workload.data is not None
        # Its folder is named after what the data held when it was looked at.
        check_unchanged(self._workload.data)
        log_path = self._log_folder / "read_data.log"
        job = {
            "id": "read_data",
            "kind": "read_data",
            "workload": self._workload.document(),
            "folder": str(folder),
            "timeout_seconds": _READ_DATA_SECONDS,
            "log_path": str(log_path),
        }
        answer = self._run_job(job, lambda _: None)
        if "result" not in answer:
            raise TrialServerError(
                f"the data could not be read: {how_it_ended(answer, str(log_path))}",
                f"see {log_path} and {self.server_log}",
            )
        if "error" in answer["result"]:
            raise InvalidRequestError(*answer["result"]["error"])

    def inspect(self, timeout_seconds: float = _INSPECT_SECONDS) -> Document:
        """What ``autotune.worker.facts.inspect`` says of this environment and workload.

        Raises ``TrialServerError`` when no answer comes, ``TrainingSourceError`` where the user's own code is why.
        """
        self.start(inspects=True)
        # The user's own code may use the GPU, which would count as part of the context.
        of_gpu = self._gpu.finish() if self._workload.source is not None else None
        log_path = self._log_folder / "inspect.log"
        job = {
            "id": "inspect",
            "kind": "inspect",
            "workload": self._workload.document(),
            "timeout_seconds": timeout_seconds,
            "log_path": str(log_path),
            **self._device_facts(),
        }
        answer = self._run_job(job, lambda _: None)
        is_answered = "result" in answer or answer.get("timed_out") or answer.get("overdue")
        if not is_answered and (answer.get("signal") or answer.get("lost")):
            # Killed from outside, perhaps; a second time it is not chance.
            answer = self._run_job(job, lambda _: None)
        if self._workload.source is not None:
            check_own_code(self._workload.source.name, answer, log_path, timeout_seconds)
        if "result" not in answer:
            raise TrialServerError(
                f"the device {self._device.label} could not be inspected: {how_it_ended(answer, str(log_path))}",
                f"see {log_path} and {self.server_log}",
            )
        return merged(answer["result"], self._gpu.finish() if of_gpu is None else of_gpu)

    def run(self, job: TrialJob, progress: Progress) -> Outcome:
        """Run one trial to its end; whatever happens to it is an outcome."""
        document = {
            "id": job.trial_id,
            "kind": "trial",
            "workload": self._workload.document(),
            "candidate": job.candidate.parameters(),
            "cap_bytes": job.cap_bytes,
            "effort": dataclasses.asdict(job.effort),
            "seed": job.seed,
            "unmodified": job.unmodified,
            "timeout_seconds": job.timeout_seconds,
            "log_path": job.log_path,
            "data_folder": str(self._data.folder) if self._data else None,
            **self._device_facts(),
        }
        kills = oom_kills()
        outcome = outcome_of(self._run_job(document, progress), job.timeout_seconds, job.log_path)
        if isinstance(outcome, Failed) and outcome.reason == "killed" and kills != (now := oom_kills()):
            # The kernel says so itself; what else it killed in these seconds is hardly another.
            message = f"the kernel ended {(now or 0) - (kills or 0)} process for want of host memory, this trial"
            return OutOfMemory(message, where="host", during=outcome.during)
        return outcome
