"""Inspect this machine in processes of their own: the GPU, and what keeps the user's code from touching their files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from autotune.core.code_interface import FoundProtection
from autotune.core.errors import TrialServerError
from autotune.core.inspection import GpuFacts, GpuWork, Inspection
from autotune.core.placement import Placement
from autotune.core.schema import decode
from autotune.devices.nvml import device_used_bytes
from autotune.execution.child_process import server_environment
from autotune.execution.oneshot import NoAnswerError, OneShot

_MODULE = "autotune.worker.gpu_facts"
# Importing torch and starting CUDA took 5 to 8 s on slow hosts (H200, 16 virtual cores).
_TIMEOUT_SECONDS = 180.0


class GpuInspection:
    """The process that measures the CUDA context and reads the chip's properties; none for a CPU.

    What it told is kept for later searches, unless the memory in use on the GPU changed meanwhile: another process then
    counts as part of the context.
    """

    def __init__(self, placement: Placement, convolves: bool) -> None:
        self._placement = placement
        self._work = GpuWork(placement.device.uuid, convolves=convolves, ranks=placement.ranks)
        self._stack = contextlib.ExitStack()
        self._process: OneShot | None = None
        self._used_before: int | None = None
        self._kept: GpuFacts | None = None
        self._log_folder: Path | None = None
        self._has_log = False

    def begin(self, log_folder: Path | None = None) -> None:
        """Start the process, unless it is running or has answered. Without a folder, it writes no log."""
        self._log_folder = log_folder
        if self._placement.kind == "cuda" and self._process is None and self._kept is None:
            self._used_before = device_used_bytes(self._work.device_uuid)
            self._has_log = log_folder is not None
            log_path = log_folder / "inspect_gpu.log" if log_folder is not None else Path(os.devnull)
            environment = server_environment(self._placement, os.environ, offline=True)
            process = OneShot(_MODULE, self._work, environment, log_path)
            self._process = self._stack.enter_context(process)

    def finish(self) -> GpuFacts | None:
        """Wait for the answer and end the process. Raises ``TrialServerError`` without an answer.

        ``None`` where no process was started, as for a CPU.
        """
        if self._kept is not None or self._process is None:
            return self._kept
        try:
            facts = self._process.answer(GpuFacts, _TIMEOUT_SECONDS)
        except TrialServerError as error:
            if not self._has_log and self._log_folder is not None:
                # It began before there was a search. Whatever it stumbled over is told by another one.
                self.close()
                self.begin(self._log_folder)
                return self.finish()
            what = "device" if self._placement.ranks == 1 else "devices"
            hint = error.hint
            if isinstance(error, NoAnswerError):
                hint += "; if torch has no CUDA, install it as pytorch.org says, or choose --device cpu"
            raise TrialServerError(
                f"the {what} {self._placement.label} could not be inspected: {error.message}", hint
            ) from error
        finally:
            self.close()
        if self._used_before is not None and device_used_bytes(self._work.device_uuid) == self._used_before:
            self._kept = facts
        return facts

    def close(self) -> None:
        """End the process if it still runs."""
        self._stack.close()
        self._process = None


def merged(inspection: Inspection, of_gpu: GpuFacts | None) -> Inspection:
    """Return the trial server's inspection completed by the facts of the GPU."""
    if of_gpu is None:
        return inspection
    software = replace(inspection.software, cuda=of_gpu.cuda, cudnn=of_gpu.cudnn, cublas=of_gpu.cublas)
    return replace(
        inspection,
        software=software,
        context_bytes=of_gpu.context_bytes,
        chip=of_gpu.chip,
        calibration=of_gpu.calibration,
    )


# It takes a tenth of a second. A network file system that does not answer would keep every trial from starting, too.
_WAIT_SECONDS = 20.0


@functools.cache
def find_protection() -> FoundProtection:
    """Return the best working file protection, tested in a separate process."""
    command = [sys.executable, "-P", "-m", "autotune.worker.user.protection"]
    try:
        said = subprocess.run(command, capture_output=True, timeout=_WAIT_SECONDS, check=False).stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    except OSError:
        said = b""
    lines = said.decode(errors="replace").splitlines()
    if not lines:
        return FoundProtection("none", "the process that tries it out ended without an answer")
    return decode(json.loads(lines[-1]), FoundProtection)
