"""Control processes: adopt orphans, die with the parent, run in a fork, kill children, bound log files."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import psutil

from autotune.core.pipes import LineReader, wait_until_ready
from autotune.core.schema import decode, encode
from autotune.core.scratch import private_opener

W = TypeVar("W")

# Interval at which a child is checked for having ended without a result.
_LOOK_SECONDS = 0.1
# A log that grows beyond this is cut to its end, so that endless output does not fill the disk. A choice.
MOST_LOG_BYTES = 16 * 1024**2
_KEPT_LOG_BYTES = 1024**2
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """Call prctl where it exists, as on Linux. It is only a second safeguard, so errors are ignored."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that this process can kill them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies; exit at once if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


Run = Callable[[Callable[[W], NoReturn]], NoReturn]
"""A function to run in a forked child. Its argument is a function that sends the result and ends the child."""


def in_fork(kind: type[W], run: Run[W]) -> W:
    """Run a function in a forked child and return its result. Without a result, this process ends as the child did."""
    child = ForkedRun(kind, run)
    result = child.result_before(lambda: False)
    assert result is not None
    child.end()
    return result


def in_forks(kind: type[W], runs: Sequence[Run[W]], *, at_once: int, limit_seconds: float) -> list[W | None]:
    """Run functions in forked children, at most ``at_once`` at a time; return their results in order.

    A result is ``None`` where its child ended without one, or had none after ``limit_seconds`` of all together.
    """
    deadline = time.monotonic() + limit_seconds
    results: list[W | None] = [None] * len(runs)
    waiting = list(range(len(runs)))
    working: dict[int, ForkedRun[W]] = {}
    try:
        while (waiting or working) and time.monotonic() < deadline:
            while waiting and len(working) < at_once:
                number = waiting.pop(0)
                working[number] = ForkedRun(kind, runs[number])
            fds = [child.lines.fd for child in working.values()]
            wait_until_ready(fds, timeout_seconds=min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            for number, child in list(working.items()):
                results[number] = child.read()
                # The end of the pipe is the end of the child, unless that has started others.
                if results[number] is not None or child.lines.closed:
                    working.pop(number).end()
    finally:
        for child in working.values():
            child.end()
    return results


class ForkedRun(Generic[W]):
    """A forked child that runs beside this process, and sends one result of type ``kind``.

    With ``stays``, the child then waits until ``end`` kills it.
    """

    def __init__(self, kind: type[W], run: Run[W], *, stays: bool = False) -> None:
        self._kind = kind
        read_fd, write_fd = os.pipe()
        parent = os.getpid()
        flush_output()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(read_fd)
            die_with(parent)
            _run_in_child(run, write_fd, stays=stays)
        os.close(write_fd)
        self.lines = LineReader(read_fd)

    def read(self) -> W | None:
        """Return the result if it has arrived, else ``None``. Does not wait."""
        lines = self.lines.read()
        return decode(json.loads(lines[0]), self._kind) if lines else None

    def result(self, limit_seconds: float) -> W | None:
        """Wait for the result, and end the child; ``None`` where it ended without a result, or exceeded the limit."""
        deadline = time.monotonic() + limit_seconds
        while (result := self.read()) is None and not self.lines.closed and (left := deadline - time.monotonic()) > 0:
            wait_until_ready([self.lines.fd], timeout_seconds=left)
        self.end()
        return result

    def result_before(self, is_over: Callable[[], bool]) -> W | None:
        """Wait for the result; return ``None`` once ``is_over`` is true.

        Where the child ends without a result, this process ends with the same code or signal. That the child has ended
        is asked of the system, since processes that the child started may hold the pipe open for longer.
        """
        while not is_over():
            wait_until_ready([] if self.lines.closed else [self.lines.fd], timeout_seconds=_LOOK_SECONDS)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if (result := self.read()) is not None:
                return result
            if pid == self._pid:
                # End by the child's signal, so that the parent of this process sees it.
                if (code := os.waitstatus_to_exitcode(status)) < 0:
                    with contextlib.suppress(OSError):
                        signal.signal(-code, signal.SIG_DFL)
                    os.kill(os.getpid(), -code)
                os._exit(code or 1)
        return None

    def end(self) -> None:
        """Kill the child if it still runs, and reap it."""
        os.close(self.lines.fd)
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


def _run_in_child(run: Run[W], result_fd: int, *, stays: bool) -> NoReturn:
    """Run the function in the child, send its result, and exit: with code 0 after a result, else 1."""

    def finish(result: W) -> NoReturn:
        """Send the result, and end this process; with ``stays``, wait until it is killed."""
        # The parent may kill this process once it has the result.
        flush_output()
        # Encoded before the descriptor is opened: an error after that would close the descriptor without a result.
        line = json.dumps(encode(result)).encode() + b"\n"
        with os.fdopen(result_fd, "wb") as stream:
            stream.write(line)
        while stays:
            signal.pause()
        leave(0)

    try:
        run(finish)
    except BaseException:
        traceback.print_exc()
    leave(1)


def serve_one_job(kind: type[W], run: Callable[[W, str], Any]) -> None:
    """Read one job from standard input, run it, and write its result to the file descriptor on the command line.

    ``run`` gets the job's work, an object of type ``kind``, and an empty folder. The process dies with its parent.
    """
    die_with(os.getppid())
    result_fd = int(sys.argv[1])
    poll = select.poll()
    # Without any event to wait for, only the closing of the other end is reported.
    poll.register(result_fd, 0)
    if poll.poll(0):
        # Nobody is left to read: the parent died while this process imported its modules, and it has another one now.
        leave(1)
    os.set_inheritable(result_fd, False)
    message = json.loads(sys.stdin.readline())
    result = run(decode(message["work"], kind), message["output_dir"])
    with os.fdopen(result_fd, "w") as stream:
        json.dump(encode(result), stream)


def flush_output() -> None:
    """Flush standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def leave(code: int) -> NoReturn:
    """Exit without clean-up, which is the parent's task."""
    flush_output()
    os._exit(code)


def end_children(spared: Collection[int] = (), limit_seconds: float = 5.0) -> None:
    """Kill and reap every child but the ``spared``, repeatedly until none is left, since orphans become children.

    Gives up after ``limit_seconds``.
    """
    deadline, this = time.monotonic() + limit_seconds, psutil.Process()
    # The children include adopted ones and zombies.
    while (left := [child.pid for child in this.children() if child.pid not in spared]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def kill_group(pid: int) -> None:
    """Kill a process and the process group that it leads, which may not exist yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def bound_log(path: str) -> None:
    """Cut a long log to its last part; lines written at the same moment may be lost.

    Processes write to the log in append mode, so later lines follow the kept part.
    """
    with contextlib.suppress(OSError):
        size = os.path.getsize(path)
        if size <= MOST_LOG_BYTES:
            return
        with open(path, "r+b") as log:
            log.seek(-_KEPT_LOG_BYTES, os.SEEK_END)
            kept = log.read(_KEPT_LOG_BYTES).partition(b"\n")[2]
            log.truncate(0)
        with open(path, "ab") as log:
            log.write(b"[autotune left out %d MiB before this]\n" % (size // 1024**2) + kept)


def append_output(log_path: str) -> None:
    """Append standard output and error to another log file; without effect where it cannot be opened."""
    with contextlib.suppress(OSError):
        log = private_opener(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        flush_output()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def redirect_output(log_path: str) -> None:
    """Redirect standard output and error to a new log file, and standard input to nothing."""
    log = private_opener(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (log, null):
        if fd > 2:
            os.close(fd)
