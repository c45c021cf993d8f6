"""Serve trials: import torch and transformers once, fork a child for each job, and report how it ended.

Both sides write lines of JSON. The controller writes to standard input: first the workload and, once the server is
``ready``, any number of jobs::

    {"workload": {…} | null}
    {"job": {"id": …, "kind": "trial" | "inspect" | "predict", "log_path": …, "timeout_seconds": …, …}}

The server writes to the file descriptor named on the command line. It sends ``ready`` or ``import_error`` once. For
each job it sends ``started`` (with ``pid``, and ``folder``, which the server removes at the end), any number of
``progress``, at most one ``result``, and exactly one ``ended`` (with ``exit_code``, ``signal``, ``timed_out``, and
``refused`` with the reason where no process could be started). When standard input closes or the controller dies, the
server kills every descendant and exits.

The server itself only imports. A tensor operation or a ``torch.cuda`` call before a fork would leave children with
dead thread pools or an unusable CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from autotune.core.errors import AutotuneError
from autotune.core.outcome import Failed, outcome_document
from autotune.core.pipes import LineReader, LineWriter, wait_until_ready
from autotune.core.scratch import Scratch, make_scratch
from autotune.worker import process
from autotune.worker.imports import COLD_VARIABLE, CudaStartedError, import_everything

# Most bytes of one line from a job. Results are far shorter, but the user's own code may write anything.
_LINE_LIMIT_BYTES = 16 * 1024**2
_FOLDER_PREFIX = "autotune-trial-"


class _Child:
    """A job whose process is running."""

    def __init__(self, job: dict[str, Any], pid: int, result_fd: int, scratch: Scratch) -> None:
        self.id = job["id"]
        self.pid = pid
        self.lines = LineReader(result_fd, _LINE_LIMIT_BYTES)
        self.deadline = time.monotonic() + float(job["timeout_seconds"])
        self.timed_out = False
        self.scratch = scratch
        self.log_path: str = job["log_path"]
        self.kind: str = job["kind"]
        self.has_result = False


class Server:
    """Waits for the controller, its children's messages and their ends all at once, and never for one of them alone."""

    def __init__(self, report_fd: int, control: LineReader, torch_threads: int) -> None:
        self._reports = LineWriter(report_fd)
        self._torch_threads = torch_threads
        self._control = control
        self._children: dict[int, _Child] = {}
        self._parent = os.getppid()
        self._told_to_leave = False
        # Every signal writes a byte to this pipe, which ends the waiting.
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._leave)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def _leave(self, *_: object) -> None:
        self._told_to_leave = True

    def report(self, message: dict[str, Any]) -> None:
        """Send a message to the controller, now or as soon as it reads again."""
        self._reports.put(json.dumps(message).encode())

    def serve(self) -> None:
        """Run jobs until the controller is gone."""
        try:
            while os.getppid() == self._parent and not self._control.closed and not self._told_to_leave:
                self._wait_and_act()
        finally:
            for child in self._children.values():
                process.kill_group(child.pid)
            process.end_children()
            for child in self._children.values():
                child.scratch.remove()

    def _wait_and_act(self) -> None:
        reading = [self._control.fd, self._wake_read]
        if not self._reports.is_full:
            reading += [child.lines.fd for child in self._children.values() if not child.lines.closed]
        writing = [self._reports.fd] if self._reports.has_waiting else []
        ready = wait_until_ready(reading, writing, self._patience_seconds())
        self._reports.flush()
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        for child in list(self._children.values()):
            self._attend(child)
        if self._control.fd in ready:
            for line in self._control.read():
                message = json.loads(line)
                if "job" in message:
                    self._start(message["job"])

    def _patience_seconds(self) -> float:
        deadlines = [child.deadline for child in self._children.values() if not child.timed_out]
        return max(0.0, min([1.0, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _start(self, job: dict[str, Any]) -> None:
        # Made and removed by the server, since a job may be killed at any point.
        try:
            scratch = make_scratch(_FOLDER_PREFIX)
        except AutotuneError as error:
            self._refuse(job, f"{error.message}; {error.hint}")
            return
        job["output_dir"] = scratch.output_dir
        job["stop_file"] = scratch.stop_file
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        fds: tuple[int, ...] = ()
        try:
            fds = read_fd, write_fd = os.pipe()
            pid = os.fork()
        except OSError as error:
            for fd in fds:
                os.close(fd)
            scratch.remove()
            self._refuse(job, f"no process can be started: {error.strerror}")
            return
        if pid == 0:
            os.close(read_fd)
            close = [self._reports.fd, self._wake_read]
            _become_child(job, scratch, server, write_fd, self._torch_threads, close)
        os.close(write_fd)
        self._children[pid] = _Child(job, pid, read_fd, scratch)
        self.report({"started": job["id"], "pid": pid, "folder": scratch.path})

    def _refuse(self, job: dict[str, Any], why: str) -> None:
        """Report the end of a job that could not be started."""
        ended = {"ended": job["id"], "exit_code": None, "signal": None, "timed_out": False}
        self.report({**ended, "refused": why})

    def _attend(self, child: _Child) -> None:
        # A job that writes faster than the controller reads has to wait, until its timeout if necessary.
        if not self._reports.is_full:
            self._forward(child)
        process.bound_log(child.log_path)
        if not child.timed_out and time.monotonic() >= child.deadline:
            child.timed_out = True
            process.kill_group(child.pid)
        try:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = child.pid, 0
        if pid != child.pid:
            return
        self._forward(child)
        process.kill_group(child.pid)
        process.bound_log(child.log_path)
        del self._children[child.pid]
        # Processes that the job left behind are orphans, which this process has adopted. Other jobs go on.
        process.end_children(spared=self._children)
        os.close(child.lines.fd)
        self._report_stop(child)
        child.scratch.remove()
        code = os.waitstatus_to_exitcode(status)
        self.report(
            {
                "ended": child.id,
                "exit_code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "timed_out": child.timed_out,
            }
        )

    def _report_stop(self, child: _Child) -> None:
        """Report, as the job's result, why a process that the job started has ended it."""
        try:
            with open(child.scratch.stop_file, encoding="utf-8") as file:
                why = json.load(file)
        except (OSError, ValueError):
            return
        if child.has_result:
            return
        if child.kind == "trial":
            result = outcome_document(Failed("error", why["message"]))
        else:
            result = {"source_error": why["message"], "source_hint": why["hint"]}
        self.report({"result": result, "id": child.id})

    def _forward(self, child: _Child) -> None:
        """Forward the child's complete lines, each with the job's id."""
        for line in child.lines.read():
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                message = {"malformed": line[:200].decode(errors="replace")}
            child.has_result = child.has_result or "result" in message
            self.report({**message, "id": child.id})


def _become_child(
    job: dict[str, Any], scratch: Scratch, server: int, result_fd: int, torch_threads: int, close: list[int]
) -> NoReturn:
    """Run one job in the forked child: in its own session and log, without clean-up at the end."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        process.die_with(server)
        process.redirect_output(job["log_path"])
        for fd in close:
            os.close(fd)
        scratch.enter()
        _run_job(job, result_fd, torch_threads)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _run_job(job: dict[str, Any], result_fd: int, torch_threads: int) -> None:
    import torch

    from autotune.worker.facts import inspect
    from autotune.worker.trial.run import run_trial

    def send(kind: str, document: dict[str, Any]) -> None:
        data = json.dumps({kind: document}).encode() + b"\n"
        while data:
            data = data[os.write(result_fd, data) :]

    torch.set_num_threads(torch_threads)
    if job["kind"] == "predict":
        # Patches torch permanently, so it is imported only in this process.
        from autotune.worker.fake.predict import predict

        send("result", predict(job))
    elif job["kind"] == "read_data":
        from autotune.worker.dataset.reading import read_data

        send("result", read_data(job))
    elif job["workload"].get("source"):
        from autotune.worker.user.run import run_own

        run_own(job, send)
    elif job["kind"] == "inspect":
        send("result", inspect(job))
    else:
        send("result", run_trial(job, lambda record: send("progress", record)))


def _read_workload(control: LineReader) -> dict[str, Any] | None:
    """Wait for the workload, which is the controller's first line; exit if the controller closes before."""
    while True:
        wait_until_ready([control.fd])
        lines = control.read()
        if lines:
            workload: dict[str, Any] | None = json.loads(lines[0])["workload"]
            return workload
        if control.closed:
            raise SystemExit(0)


def main() -> None:
    """Run ``python -m autotune.worker.server REPORT_FD``."""
    report_fd = int(sys.argv[1])
    os.set_inheritable(report_fd, False)
    process.adopt_orphans()
    control = LineReader(0)
    # Not needed where trials import by themselves. The line may have been read before this process started itself
    # again.
    preload = None if COLD_VARIABLE in os.environ else _read_workload(control)
    try:
        threads = import_everything(preload)
    except CudaStartedError:
        print("an installed package starts CUDA when it is imported, so every trial imports by itself", flush=True)
        os.set_inheritable(report_fd, True)
        os.execve(sys.executable, sys.orig_argv, {**os.environ, COLD_VARIABLE: "1"})
    except BaseException as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        os.write(report_fd, json.dumps({"import_error": message}).encode() + b"\n")
        raise SystemExit(1) from error
    server = Server(report_fd, control, threads)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        server.report({"ready": os.getpid()})
        server.serve()
    # All children have ended. Skip Python's clean-up, since tearing torch down module by module takes a second.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
