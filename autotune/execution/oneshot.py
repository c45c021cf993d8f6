"""Run one job in a new worker process, which ends with its answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from autotune.core.errors import TrialServerError
from autotune.core.pipes import wait_until_ready, write_all
from autotune.core.placement import Placement
from autotune.core.private_files import private_opener
from autotune.core.schema import decode, encode
from autotune.core.scratch import make_scratch
from autotune.execution import launch
from autotune.execution.process_environment import server_environment
from autotune.execution.process_outcome import tail

# A job that fits into the pipe is written at once. Of a longer one the rest is read after torch was imported.
_WRITE_SECONDS = 180.0
_SAME_VERSION = "see whether autotune was updated in the meantime, and start the command again"

T = TypeVar("T")


class NoAnswerError(TrialServerError):
    """The process ended without an answer."""


class OneShot:
    """A worker process for one job. Entering starts it; leaving ends it, and removes every file of it."""

    def __init__(
        self,
        module: str,
        work: object,
        placement: Placement,
        log_path: Path,
        *,
        offline: bool,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Run ``python -m module`` on some work; the process sees the devices of ``placement`` alone.

        ``variables`` are set in it. It also gets ``output_dir``, an empty temporary folder. An ``offline`` process
        never asks the Hugging Face hub.
        """
        self._module = module
        self._work = work
        self._placement = placement
        self._log_path = log_path
        self._offline = offline
        self._variables = variables or {}
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._read_fd = -1

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            scratch = make_scratch("autotune-")
            stack.callback(scratch.remove)
            self._read_fd, write_fd = os.pipe()
            stack.callback(os.close, self._read_fd)
            environment = server_environment(self._placement, os.environ, offline=self._offline)
            try:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._log_path, "wb", opener=private_opener) as log:
                    process = launch.start_module(
                        self._module,
                        write_fd,
                        log,
                        {**environment, **self._variables, "TMPDIR": scratch.temporary},
                    )
            except OSError as error:
                raise TrialServerError(
                    f"no process could be started: {error}", f"make room beside {self._log_path}"
                ) from error
            finally:
                os.close(write_fd)
            self._process = process
            stack.callback(self._end)
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            job = {"work": encode(self._work), "output_dir": scratch.output_dir}
            # One that ended at once has closed its end; its log says why.
            write_all(process.stdin.fileno(), json.dumps(job).encode() + b"\n", time.monotonic() + _WRITE_SECONDS)
            with contextlib.suppress(OSError):
                process.stdin.close()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def answer(self, kind: type[T], timeout_seconds: float) -> T:
        """Wait for the answer, which is of a type; raises ``TrialServerError`` where none comes in time."""
        said = _read_to_end(self._read_fd, time.monotonic() + timeout_seconds)
        if said is None:
            raise TrialServerError(f"no answer came within {timeout_seconds:.0f} s", f"see {self._log_path}")
        try:
            document = json.loads(said)
        except ValueError as error:
            last = tail(self._log_path, 1) or "it said nothing"
            raise NoAnswerError(f"the process ended without an answer: {last}", f"see {self._log_path}") from error
        try:
            return decode(document, kind)
        except ValueError as error:
            raise TrialServerError(f"the process gave no answer that can be read: {error}", _SAME_VERSION) from error

    def _end(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_fresh(
    module: str,
    work: object,
    kind: type[T],
    placement: Placement,
    log_path: Path,
    timeout_seconds: float,
    *,
    offline: bool,
    variables: Mapping[str, str] | None = None,
) -> T:
    """Run ``python -m module`` on some work and return its answer of a type; no process and no file of it is left.

    Raises ``TrialServerError`` where no answer comes in time.
    """
    with OneShot(module, work, placement, log_path, offline=offline, variables=variables) as process:
        return process.answer(kind, timeout_seconds)


def _read_to_end(fd: int, deadline: float) -> bytes | None:
    """Return all that is written until the other end is closed; ``None`` where that takes too long."""
    said = b""
    while wait_until_ready([fd], timeout_seconds=max(0.0, deadline - time.monotonic())):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return said
        said += chunk
    return None
