"""Report what only a process that uses the GPU can tell: its CUDA context, libraries, the chip's properties and rates.

Started as ``python -m autotune.worker.gpu_facts RESULT_FD`` with one job, a line of JSON, on standard input. It runs
beside the trial server and imports torch alone, so that it has ended before the server has imported transformers.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch

from autotune.core.chip import Chip
from autotune.core.inspection import GpuFacts, GpuWork
from autotune.worker.calibration import calibrate
from autotune.worker.context import context_bytes
from autotune.worker.process import serve_one_job


def gpu_facts(work: GpuWork, _: str) -> GpuFacts:
    """Return the facts that are added to those of ``autotune.worker.facts.inspect``."""
    if torch.version.hip:
        raise SystemExit(f"torch {torch.__version__} is built for AMD's ROCm, which is not supported")
    # First, since this starts CUDA.
    measured_bytes = context_bytes(work.device_uuid, convolves=work.convolves)
    properties = torch.cuda.get_device_properties(0)
    chip = Chip(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor,
        properties.name,
    )
    calibration = None
    # Only to predict better: without it, specified rates are used.
    with contextlib.suppress(Exception):
        calibration = calibrate(torch.device("cuda", 0))
    return GpuFacts(measured_bytes, chip, torch.version.cuda, _cudnn_version(), _cublas_version(), calibration)


def _cudnn_version() -> int | None:
    """Return the version of the cuDNN that torch has loaded: 91900 for 9.19.0."""
    try:
        return torch.backends.cudnn.version()  # type: ignore[no-untyped-call, no-any-return, unused-ignore]
    except Exception:
        # A cuDNN that does not match this torch. A trial will report it.
        return None


def _cublas_version() -> str | None:
    """Return the version of the cuBLAS that this process has loaded; torch has no function for it."""
    try:
        mapped = {
            line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
        }
        path = next(path for path in sorted(mapped) if Path(path).name.startswith("libcublas.so"))
        library, number, parts = ctypes.CDLL(path), ctypes.c_int(), []
        # library_types.h: MAJOR_VERSION, MINOR_VERSION and PATCH_LEVEL are 0, 1 and 2.
        for part in range(3):
            if library.cublasGetProperty(part, ctypes.byref(number)) != 0:
                return None
            parts.append(str(number.value))
        return ".".join(parts)
    except (OSError, StopIteration, AttributeError):
        return None


if __name__ == "__main__":
    serve_one_job(GpuWork, gpu_facts)
