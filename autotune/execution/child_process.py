"""Run a module in a child process: write lines to it, read its lines, wait for its end, or end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from typing import IO

from autotune.core.candidate import Document
from autotune.core.pipes import LineReader, wait_until_ready, write_all

# Tests replace ``Popen``: to start another program, or to fork from an interpreter that has imported torch.


class ChildProcess:
    """``python -P -m MODULE FD ARGUMENTS…`` in a session of its own, which writes lines to the file descriptor FD.

    It reads lines from its standard input. Ctrl-C in a terminal reaches the whole foreground group; with a session of
    its own the process does not get it, and whoever started it alone decides when it ends.
    """

    def __init__(
        self, module: str, log: IO[bytes] | int, environment: Mapping[str, str], arguments: tuple[str, ...] = ()
    ) -> None:
        """Start the process. Its output goes to ``log``, with ``subprocess.PIPE`` to ``output``.

        Raises ``OSError`` where no process can be started.
        """
        read_fd, write_fd = os.pipe()
        try:
            self._process = Popen(
                [sys.executable, "-P", "-m", module, str(write_fd), *arguments],
                stdin=PIPE,
                stdout=log,
                stderr=STDOUT,
                pass_fds=[write_fd],
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self.output = self._process.stdout
        self.reports = LineReader(read_fd)
        self._writing = threading.Lock()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def send(self, message: Document, deadline: float) -> bool:
        """Send a line. Return ``False`` where the process is gone or does not read before the deadline."""
        with self._writing:
            if self._stdin.closed:
                return False
            return write_all(self._stdin.fileno(), json.dumps(message).encode() + b"\n", deadline)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that the process writes, until the pipe is closed."""
        while not self.reports.closed:
            wait_until_ready([self.reports.fd])
            yield from self.reports.read()

    def read_to_end(self, deadline: float) -> bytes | None:
        """Return everything that the process writes until its end; ``None`` after the deadline."""
        said = b""
        while wait_until_ready([self.reports.fd], timeout_seconds=max(0.0, deadline - time.monotonic())):
            chunk = os.read(self.reports.fd, 1 << 16)
            if not chunk:
                return said
            said += chunk
        return None

    def close_input(self) -> None:
        """Close the standard input of the process, which tells it to end."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end and return the exit status; ``None`` after a timeout."""
        with contextlib.suppress(TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Kill the process and all processes of its session, and wait for its end."""
        # The id of one that was waited for may be another's by now.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def end(self, seconds: float = 0.0) -> None:
        """Tell the process to end, kill it after ``seconds``, and close its pipes."""
        self.close_input()
        if not seconds or self.wait(seconds) is None:
            self.kill()
        if self.output is not None:
            self.output.close()
        self.close()

    def close(self) -> None:
        """Close the pipe from the process."""
        if self.reports.fd >= 0:
            os.close(self.reports.fd)
            self.reports.fd = -1
