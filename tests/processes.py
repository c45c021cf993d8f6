"""Look at real processes through /proc: their descendants, and which are still running."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    """The state letter and the parent of a process; ``None`` once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def receive(queue: multiprocessing.SimpleQueue[str], seconds: float = 60.0) -> str:
    """The next value that another process puts; an error of the test where none comes in time."""
    assert queue._reader.poll(seconds), "no answer came"  # type: ignore[attr-defined]
    return queue.get()


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    found = _state_and_parent(pid)
    return found is not None and found[0] not in "ZX"


def parent(pid: int) -> int | None:
    """The parent of a process that is no zombie."""
    found = _state_and_parent(pid)
    return found[1] if found is not None and found[0] not in "ZX" else None


def children(pid: int) -> list[int]:
    """Living direct children of a process, oldest first."""
    pids = sorted(int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [child for child in pids if (found := _state_and_parent(child)) and found[1] == pid and found[0] not in "ZX"]


def processes_named(words: str, pids: Iterable[int]) -> list[int]:
    """Those of these processes whose command line has the words in it."""
    return [pid for pid in pids if words in _command_line(pid)]


def processes_with(variable: str, value: str) -> list[int]:
    """Every living process that was started with this value of an environment variable."""
    mark = f"{variable}={value}\0".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes() and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def all_gone(pids: Iterable[int], seconds: float = 120.0) -> bool:
    """Whether every one of these processes ended in time."""
    waited_for = list(pids)
    return wait_until(lambda: not any(map(is_alive, waited_for)), seconds)


def ignore_polite_signals() -> None:
    """Have this process go on at every signal that asks it to end."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def leave_descendants() -> None:
    """Leave an orphaned child and grandchild with sessions of their own, which ignore every polite signal.

    Returns once both have told their process ids.
    """
    told, tells = os.pipe()
    if os.fork():
        os.close(tells)
        for _ in range(2):
            os.read(told, 1)
        os.close(told)
        return
    os.setsid()
    ignore_polite_signals()
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            os.setsid()
    print(f"descendant {os.getpid()}", flush=True)
    os.write(tells, b".")
    time.sleep(600)
    os._exit(0)
