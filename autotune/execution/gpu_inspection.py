"""Ask a process of its own what only one that uses the GPU can tell, while the trial server imports."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from autotune.core.errors import TrialServerError
from autotune.core.inspection import GpuFacts, GpuWork, Inspection
from autotune.core.placement import Placement
from autotune.core.workload import Workload
from autotune.execution.oneshot import OneShot

_MODULE = "autotune.worker.gpu_facts"
# Importing torch and starting CUDA took 5 to 8 s on slow hosts (H200, 16 virtual cores).
_TIMEOUT_SECONDS = 180.0


class GpuInspection:
    """The process that measures the CUDA context and reads the chip's properties; none for a CPU."""

    def __init__(self, placement: Placement, workload: Workload, log_folder: Path) -> None:
        self._placement = placement
        self._work = GpuWork(placement.device.uuid, convolves=not workload.is_text)
        self._log_path = log_folder / "inspect_gpu.log"
        self._stack = contextlib.ExitStack()
        self._process: OneShot | None = None

    def begin(self) -> None:
        """Start the process, unless that is done."""
        if self._placement.kind == "cuda" and self._process is None:
            process = OneShot(_MODULE, self._work, self._placement, self._log_path, offline=True)
            self._process = self._stack.enter_context(process)

    def finish(self) -> GpuFacts | None:
        """Wait for what it tells, and end it; raises ``TrialServerError`` where no answer comes.

        ``None`` where no process was started, as for a CPU.
        """
        if self._process is None:
            return None
        try:
            return self._process.answer(GpuFacts, _TIMEOUT_SECONDS)
        except TrialServerError as error:
            raise TrialServerError(
                f"the device {self._placement.label} could not be inspected: {error.message}", error.hint
            ) from error
        finally:
            self.close()

    def close(self) -> None:
        """End the process where it still runs."""
        self._stack.close()
        self._process = None


def merged(inspection: Inspection, of_gpu: GpuFacts | None) -> Inspection:
    """Return what the trial server found out with the facts of the GPU beside it."""
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
