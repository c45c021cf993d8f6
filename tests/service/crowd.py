"""Hold half-sent requests open, more than the service may open files, and measure how others are answered.

1,100 under a limit of 1,024 files for half a minute; each that is closed is opened again every five seconds.
"""

import contextlib
import resource
import socket
import time
from pathlib import Path
from typing import Any

from served import Service
from standing_in import with_devices

OPEN_FILES = 1024
HALF_OPEN = 1100
SECONDS = 30.0
AGAIN_SECONDS = 5.0
AIMS = {"slowest answer to others (s)": 1.0, "growth of the log (KB)": 1000.0}


class Crowd:
    """Connections that never finish their request."""

    def __init__(self, port: int, size: int) -> None:
        self._address, self._size = ("127.0.0.1", port), size
        self._held: list[socket.socket] = []
        self.opened = 0

    def fill(self) -> None:
        self._held = [each for each in self._held if not self._is_closed(each)]
        while len(self._held) < self._size:
            with contextlib.suppress(OSError):
                half = socket.create_connection(self._address, timeout=5)
                half.sendall(b"GET /v1/searches HTTP/1.1\r\nHost: 127.0.0.1\r\n")
                half.setblocking(False)
                self._held.append(half)
                self.opened += 1

    @staticmethod
    def _is_closed(half: socket.socket) -> bool:
        try:
            is_closed = half.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            is_closed = True
        if is_closed:
            half.close()
        return is_closed

    def leave(self) -> None:
        for half in self._held:
            half.close()


def limited(open_files: int) -> Any:
    """Return the option of ``Service.serve`` with which the service may open so many files."""
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))}


def measure(folder: Path) -> dict[str, Any]:
    """Crowd a service of its own; return what was found."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * HALF_OPEN), hard))
    answers: list[float] = []
    with Service(folder, with_devices(folder, {"crowded": 1})) as service, contextlib.ExitStack() as stack:
        service.serve("--storage", "a.db", **limited(OPEN_FILES))
        log = folder / "serve.err"
        before, crowd = log.stat().st_size, Crowd(int(service.url.rpartition(":")[2]), HALF_OPEN)
        stack.callback(crowd.leave)
        due = time.monotonic()
        deadline = due + SECONDS
        while time.monotonic() < deadline:
            if time.monotonic() >= due:
                crowd.fill()
                due = time.monotonic() + AGAIN_SECONDS
            # Of somebody else, each over a connection of its own.
            for path in ("/healthz", "/v1/searches?limit=1"):
                started = time.monotonic()
                service.call("GET", path)
                answers.append(time.monotonic() - started)
            time.sleep(0.1)
        growth_kb = (log.stat().st_size - before) / 1000
    return {
        "half-sent requests": HALF_OPEN,
        "of them opened, with those that were opened again": crowd.opened,
        "files that the service may open": OPEN_FILES,
        "answers to others": len(answers),
        "slowest answer to others (s)": round(max(answers), 3),
        "growth of the log (KB)": round(growth_kb, 1),
    }
