"""What the operating system must be told so that a trial leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """Best effort: systems without prctl lose a second line of defence, not the first."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants whose parent died become this process's children, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; leave at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def children() -> list[int]:
    """Process ids of this process's direct children, adopted ones among them; zombies too."""
    own = os.getpid()
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == own:
            found.append(int(entry.parent.name))
    return found


def end_children(spared: Collection[int] = (), limit_seconds: float = 5.0) -> None:
    """Kill and reap every child but the ``spared`` until none is left; each round meets those the last one orphaned."""
    deadline = time.monotonic() + limit_seconds
    while (left := [pid for pid in children() if pid not in spared]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def kill_group(pid: int) -> None:
    """Kill a trial and its process group, also when it has not become a group leader yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


# A trial that prints without end must not fill the disk. What it said last is what people look for.
MOST_LOG_BYTES = 16 * 1024**2
_KEPT_LOG_BYTES = 1024**2


def bound_log(path: str) -> None:
    """Cut a log that has grown too long down to its end; lines that come at that moment may be lost.

    Whoever writes to it appends, so that what follows comes after what is kept.
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


def redirect_output(log_path: str) -> None:
    """Give standard output and error to a log file, which begins anew, and standard input to nothing."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (log, null):
        if fd > 2:
            os.close(fd)
