"""Start the process of a trial server, and keep one that has done its imports ready for the next search."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.core.candidate import Document
from autotune.core.errors import TrialServerError
from autotune.core.pipes import LineReader, write_all
from autotune.core.placement import Placement
from autotune.core.private_files import private_opener
from autotune.core.workload import Workload
from autotune.execution import launch
from autotune.execution.gpu_inspection import GpuInspection
from autotune.execution.process_environment import server_environment
from autotune.space.features import version_of

# How long a server may take to end what it runs once its pipe is closed; it needs milliseconds.
LEAVE_SECONDS = 10.0
# Packages that a server has loaded: after an upgrade it would mix two versions of them.
_LOADED = ("torch", "transformers", "accelerate", "datasets", "peft")


@dataclass(frozen=True)
class Imports:
    """What a server has imported and under which circumstances; a search can use a server of equal imports."""

    uses_datasets: bool
    uses_adapters: bool
    environment: Mapping[str, str]
    versions: tuple[str | None, ...]

    @staticmethod
    def of(workload: Workload | None, environment: Mapping[str, str]) -> Imports | None:
        """Return the imports for a workload; ``None`` for code of the user's own, which may need any package.

        No workload stands for one without a dataset and adapters.
        """
        if workload is not None and workload.source is not None:
            return None
        return Imports(
            uses_datasets=workload is not None and workload.data is not None,
            uses_adapters=workload is not None and bool(workload.peft or workload.quantize),
            environment=dict(environment),
            versions=_loaded_versions(),
        )


def _loaded_versions() -> tuple[str | None, ...]:
    return tuple(version_of(package) for package in _LOADED)


@dataclass
class StartedServer:
    """The process of a trial server, and the pipe from which its messages are read."""

    process: subprocess.Popen[bytes]
    reports: LineReader
    imports: Imports | None
    is_ready: bool = False
    """Whether it can take jobs: its imports are done."""

    def send(self, message: Document, deadline: float) -> bool:
        """Send a line; return ``False`` where the server is gone or does not read before the deadline."""
        assert self.process.stdin is not None
        return write_all(self.process.stdin.fileno(), json.dumps(message).encode() + b"\n", deadline)

    def end(self) -> None:
        """End the process with everything that it runs."""
        if not self.is_ready:
            # It runs nothing yet, and would only hear of the closed pipe once its imports are done.
            self.process.kill()
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.reports.fd)


def start_server(log_path: Path, environment: Mapping[str, str], imports: Imports | None) -> StartedServer:
    """Start a server, which waits to be told its workload; raises ``OSError`` where there can be no process."""
    read_fd, write_fd = os.pipe()
    try:
        with open(log_path, "ab", opener=private_opener) as log:
            process = launch.start_module("autotune.worker.server", write_fd, log, environment)
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return StartedServer(process, LineReader(read_fd), imports)


class WarmServer:
    """A context manager that keeps at most one idle server, and what is known of its GPU; on leaving it is ended.

    An idle server has imported torch and transformers and nothing else: it has never touched CUDA (the server ends
    itself where an import did), so it holds host memory and no GPU memory.
    """

    def __init__(self) -> None:
        self._idle: StartedServer | None = None
        self._inspections: dict[tuple[str, bool, tuple[str | None, ...]], GpuInspection] = {}

    def __enter__(self) -> WarmServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process id of the idle server."""
        return self._idle.process.pid if self._idle is not None else None

    def prepare(self, placement: Placement, environment: Mapping[str, str]) -> None:
        """Start a server for the next search, unless one is idle: its imports are those of most workloads.

        The GPU is inspected beside it. Where no process can be started, the next search says why.
        """
        with contextlib.suppress(TrialServerError):
            self.inspection(placement, convolves=False).begin()
        if self._idle is not None and self._idle.process.poll() is None:
            return
        self._end_idle()
        variables = server_environment(placement, environment, offline=True)
        with contextlib.suppress(OSError):
            self._idle = start_server(Path(os.devnull), variables, Imports.of(None, variables))
            self._idle.send({"workload": None, "is_plain": True}, time.monotonic() + LEAVE_SECONDS)

    def inspection(self, placement: Placement, *, convolves: bool) -> GpuInspection:
        """Return the inspection of the GPU, with or without the kernels of convolutions; it may have begun."""
        key = (placement.device.uuid, convolves, _loaded_versions())
        return self._inspections.setdefault(key, GpuInspection(placement, convolves))

    def take(self, imports: Imports | None) -> StartedServer | None:
        """Hand out the idle server where its imports are those that are needed; another one is ended."""
        idle, self._idle = self._idle, None
        if idle is not None and (imports is None or idle.imports != imports or idle.process.poll() is not None):
            idle.end()
            return None
        return idle

    def keep(self, server: StartedServer) -> None:
        """Keep a server that runs nothing; one whose imports no other search can use is ended."""
        if server.imports is None or server.process.poll() is not None:
            server.end()
            return
        self._end_idle()
        self._idle = server

    def close(self) -> None:
        """End the idle server, and an inspection under way."""
        for inspection in self._inspections.values():
            inspection.close()
        self._end_idle()

    def _end_idle(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.end()
