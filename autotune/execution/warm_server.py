"""Start the process of a trial server, and keep one that has done its imports ready for the next search."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.core.errors import TrialServerError
from autotune.core.placement import Placement
from autotune.core.private_files import private_opener
from autotune.core.workload import Workload
from autotune.execution.child_process import ChildProcess
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
        """Return the imports for a workload; ``None`` for the user's own code, which may need any package.

        No workload means a workload without dataset and adapters.
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


class StartedServer(ChildProcess):
    """The process of a trial server, which waits to be told its workload."""

    def __init__(self, log_path: Path, environment: Mapping[str, str], imports: Imports | None) -> None:
        """Start the process. Raises ``OSError`` where no process can be started."""
        with open(log_path, "ab", opener=private_opener) as log:
            super().__init__("autotune.worker.server", log, environment)
        self.imports = imports
        self.is_ready = False
        """Whether it can take jobs: its imports are done."""

    def leave(self) -> None:
        """End the process and all its jobs."""
        # Before its imports are done it runs nothing, and would only hear of the closed pipe then.
        self.end(LEAVE_SECONDS if self.is_ready else 0.0)


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
        return self._idle.pid if self._idle is not None else None

    def prepare(self, placement: Placement, environment: Mapping[str, str]) -> None:
        """Start a server for the next search, unless one is idle, with the imports of most workloads.

        The GPU is inspected at the same time. Where no process can be started, the next search reports why.
        """
        with contextlib.suppress(TrialServerError):
            self.inspection(placement, convolves=False).begin()
        if self._idle is not None and self._idle.is_alive:
            return
        self._end_idle()
        variables = server_environment(placement, environment, offline=True)
        with contextlib.suppress(OSError):
            self._idle = StartedServer(Path(os.devnull), variables, Imports.of(None, variables))
            self._idle.send({"workload": None, "is_plain": True}, time.monotonic() + LEAVE_SECONDS)

    def inspection(self, placement: Placement, *, convolves: bool) -> GpuInspection:
        """Return the inspection of the GPU, with or without convolution kernels; it may have begun."""
        key = (placement.device.uuid, convolves, _loaded_versions())
        return self._inspections.setdefault(key, GpuInspection(placement, convolves))

    def take(self, imports: Imports | None) -> StartedServer | None:
        """Return the idle server if its imports match; end it otherwise."""
        idle, self._idle = self._idle, None
        if idle is not None and (imports is None or idle.imports != imports or not idle.is_alive):
            idle.leave()
            return None
        return idle

    def keep(self, server: StartedServer) -> None:
        """Keep an idle server; end it where no other search can use its imports."""
        if server.imports is None or not server.is_alive:
            server.leave()
            return
        self._end_idle()
        self._idle = server

    def close(self) -> None:
        """End the idle server and running inspections."""
        for inspection in self._inspections.values():
            inspection.close()
        self._end_idle()

    def _end_idle(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.leave()
