"""The server process: imports torch and transformers once, forks a child per job, reports how it ended.

Spoken over two pipes in lines of JSON. From the controller, on standard input::

    {"job": {"id": …, "kind": "trial" | "inspect" | "predict", "log_path": …, "timeout_seconds": …, …}}

and back, on the file descriptor named on the command line: ``ready`` or ``import_error`` once,
then for each job any number of ``progress``, at most one ``result``, and exactly one ``ended``
(with ``exit_code``, ``signal``, ``timed_out``). When standard input closes, or the
controller dies, every descendant is killed and the server leaves.

The server itself imports only. A tensor operation or a ``torch.cuda`` call before a fork would
leave children with dead thread pools or an unusable CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

from autotune.worker import process
from autotune.worker.imports import COLD_VARIABLE, CudaStartedError, import_everything

_LINE_LIMIT_BYTES = 16 * 1024**2


class _Lines:
    """Whole lines out of a non-blocking file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> list[bytes]:
        """Every line that is complete by now; sets ``closed`` once the other end is closed."""
        lines: list[bytes] = []
        while True:
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return lines
            if not chunk:
                self.closed = True
                return lines
            *complete, self._rest = (self._rest + chunk).split(b"\n")
            lines += complete
            if len(self._rest) > _LINE_LIMIT_BYTES:
                self._rest = b""


class _Child:
    """A job under way."""

    def __init__(self, job: dict[str, Any], pid: int, result_fd: int) -> None:
        self.id = job["id"]
        self.pid = pid
        self.lines = _Lines(result_fd)
        self.deadline = time.monotonic() + float(job["timeout_seconds"])
        self.timed_out = False
        self.output_dir: str | None = job.get("output_dir")
        self.log_path: str = job["log_path"]


class Server:
    """Waits on the controller, the child's result pipe and the child's end, all at once."""

    def __init__(self, report_fd: int, torch_threads: int) -> None:
        self._report_fd = report_fd
        self._torch_threads = torch_threads
        self._control = _Lines(0)
        self._children: dict[int, _Child] = {}
        self._parent = os.getppid()
        self._told_to_leave = False
        # A byte arrives here with every signal, so that select sees it.
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._leave)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def _leave(self, *_: object) -> None:
        self._told_to_leave = True

    def report(self, message: dict[str, Any]) -> None:
        """One line to the controller."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._report_fd, data) :]

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
                _remove(child.output_dir)

    def _wait_and_act(self) -> None:
        fds = [self._control.fd, self._wake_read]
        fds += [child.lines.fd for child in self._children.values() if not child.lines.closed]
        readable, _, _ = select.select(fds, [], [], self._patience_seconds())
        if self._wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        for child in list(self._children.values()):
            self._attend(child)
        if self._control.fd in readable:
            for line in self._control.read():
                self._start(json.loads(line)["job"])

    def _patience_seconds(self) -> float:
        deadlines = [child.deadline for child in self._children.values() if not child.timed_out]
        return max(0.0, min([1.0, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _start(self, job: dict[str, Any]) -> None:
        if (job.get("workload") or {}).get("source"):
            # Made and taken away here, since the user's code is stopped at any point.
            job["output_dir"] = tempfile.mkdtemp(prefix="autotune-trial-")
        read_fd, write_fd = os.pipe()
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            _become_child(job, server, write_fd, self._torch_threads, [self._report_fd, self._wake_read])
        os.close(write_fd)
        self._children[pid] = _Child(job, pid, read_fd)
        self.report({"started": job["id"], "pid": pid})

    def _attend(self, child: _Child) -> None:
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
        # What the job left behind was orphaned, and so adopted; other jobs go on.
        process.end_children(spared=self._children)
        os.close(child.lines.fd)
        _remove(child.output_dir)
        code = os.waitstatus_to_exitcode(status)
        self.report(
            {
                "ended": child.id,
                "exit_code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "timed_out": child.timed_out,
            }
        )

    def _forward(self, child: _Child) -> None:
        """Hand the child's complete lines on, each marked with whose it is."""
        for line in child.lines.read():
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                message = {"malformed": line[:200].decode(errors="replace")}
            self.report({**message, "id": child.id})


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _become_child(job: dict[str, Any], server: int, result_fd: int, torch_threads: int, close: list[int]) -> NoReturn:
    """The forked half: its own session and log, one job, one result, then gone without clean-up."""
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
    from autotune.worker.trial import run_trial

    def send(kind: str, document: dict[str, Any]) -> None:
        data = json.dumps({kind: document}).encode() + b"\n"
        while data:
            data = data[os.write(result_fd, data) :]

    torch.set_num_threads(torch_threads)
    if job["kind"] == "predict":
        # Patches torch for good, so it is imported where it is used: in this process alone.
        from autotune.worker.predict import predict

        send("result", predict(job))
    elif job["kind"] == "read_data":
        from autotune.worker.reading import read_data

        send("result", read_data(job))
    elif job["workload"].get("source"):
        from autotune.worker.own import run_own

        run_own(job, send)
    elif job["kind"] == "inspect":
        send("result", inspect(job))
    else:
        send("result", run_trial(job, lambda record: send("progress", record)))


def main() -> None:
    """``python -m autotune.worker.server REPORT_FD [WORKLOAD_JSON]``."""
    report_fd = int(sys.argv[1])
    os.set_inheritable(report_fd, False)
    process.adopt_orphans()
    try:
        threads = import_everything(json.loads(sys.argv[2]) if len(sys.argv) > 2 else None)
    except CudaStartedError:
        print("an installed package starts CUDA when it is imported, so every trial imports by itself", flush=True)
        os.set_inheritable(report_fd, True)
        os.execve(sys.executable, sys.orig_argv, {**os.environ, COLD_VARIABLE: "1"})
    except BaseException as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        os.write(report_fd, json.dumps({"import_error": message}).encode() + b"\n")
        raise SystemExit(1) from error
    server = Server(report_fd, threads)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        server.report({"ready": os.getpid()})
        server.serve()
    # Everything is ended by now; taking torch apart module by module would cost another second.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
