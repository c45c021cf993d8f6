"""Hold half-sent requests open, more than the service may open files, and measure how others are answered.

``python tests/service/crowd.py`` holds 1,100 under a limit of 1,024 files for half a minute; each that is closed is
opened again every five seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

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
        """Open again what was closed."""
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
        """Close all."""
        for half in self._held:
            half.close()


def answer_seconds(url: str, token: str) -> float:
    """Return how long the slower of two requests of somebody else takes, each over a connection of its own."""
    seconds = []
    for path in ("/healthz", "/v1/searches?limit=1"):
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
        started = time.monotonic()
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        seconds.append(time.monotonic() - started)
    return max(seconds)


def measure(half_open: int = HALF_OPEN, open_files: int = OPEN_FILES, lasts_seconds: float = SECONDS) -> dict[str, Any]:
    """Crowd a service of its own; return what was found."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * half_open), hard))
    with tempfile.TemporaryDirectory() as folder:
        plan, log = Path(folder, "plan"), Path(folder, "log")
        plan.write_text(json.dumps({"devices": [{"name": "crowded", "gpus": 1}], "seconds": None}))
        program = str(Path(__file__).with_name("standing_in.py"))
        with log.open("wb") as errors:
            service = subprocess.Popen(
                [sys.executable, program, str(plan), "serve", "--port", "0", "--storage", f"{folder}/a.db"],
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files)),
                stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder,
            )  # fmt: skip
        crowd = None
        try:
            assert service.stdout is not None
            url, _, token = service.stdout.readline().strip().partition("/#token=")
            before, crowd = log.stat().st_size, Crowd(int(url.rpartition(":")[2]), half_open)
            answers = []
            due = time.monotonic()
            deadline = due + lasts_seconds
            while time.monotonic() < deadline:
                if time.monotonic() >= due:
                    crowd.fill()
                    due = time.monotonic() + AGAIN_SECONDS
                answers.append(answer_seconds(url, token))
                time.sleep(0.1)
            return {
                "half-sent requests": half_open,
                "of them opened, with those that were opened again": crowd.opened,
                "files that the service may open": open_files,
                "answers to others": 2 * len(answers),
                "slowest answer to others (s)": round(max(answers), 3),
                "growth of the log (KB)": round((log.stat().st_size - before) / 1000, 1),
            }
        finally:
            if crowd is not None:
                crowd.leave()
            service.terminate()
            service.wait(30)


def main() -> None:
    """Measure, and print it."""
    told = measure()
    for name, value in told.items():
        print(f"{name:<52} {value:>8}")
    print(f"load average {os.getloadavg()[0]:.1f}")
    raise SystemExit(any(told[name] > aim for name, aim in AIMS.items()))


if __name__ == "__main__":
    main()
