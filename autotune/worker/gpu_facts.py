"""Report what only a process that uses the GPU can tell: its CUDA context, libraries, the chip's properties and rates.

Started as ``python -m autotune.worker.gpu_facts RESULT_FD`` with one job, a line of JSON, on standard input. It runs
beside the trial server and imports torch alone, so that it has ended before the server has imported transformers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune.core.candidate import group_size
from autotune.core.device import Calibration, Chip, Collective
from autotune.core.inspection import GpuFacts, GpuWork
from autotune.worker.process import serve_one_job
from autotune.worker.trial.meter import context_bytes

T = TypeVar("T")


def gpu_facts(work: GpuWork, _: str) -> GpuFacts:
    """Return the facts about the GPU for an inspection."""
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
    calibration = cudnn = None
    # 91900 for 9.19.0. A library that does not match this torch raises an error, which the trials will report.
    with contextlib.suppress(Exception):
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call, unused-ignore]
    # The calibration only improves predictions: without it, specified rates are used.
    with contextlib.suppress(Exception):
        calibration = calibrate(torch.device("cuda", 0))
        if work.ranks > 1:
            calibration = replace(
                calibration, collectives=_with_time_limit(_MOST_SECONDS, lambda: collectives(work.ranks)) or {}
            )
    return GpuFacts(measured_bytes, chip, torch.version.cuda, cudnn, _cublas_version(), calibration)


def _cublas_version() -> str | None:
    """Return the version of the loaded cuBLAS library; torch has no function for it."""
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


# Calibration of the GPU and the host in half a second: matrix products, memory traffic, launches, dispatch

BUDGET_SECONDS = 0.5
"""Time for all parts together. Each part stops at its share of this time, but runs at least once."""
_PARTS = 6
# Large enough for a data centre GPU to reach its rate: 0.2 ms in 16 bits on an H200, 17 ms in float32 on a T4.
_GPU_SIZE = 4096
_CPU_SIZE = 256
_GPU_BYTES = 2**28
_CPU_BYTES = 2**22
_RUN_TOGETHER = 10
_LAUNCHES = 200


def calibrate(device: torch.device, budget_seconds: float = BUDGET_SECONDS) -> Calibration:
    """Measure a device and its host: rates of matrix products by kind, bandwidth, seconds of a launch and a dispatch.

    Each is the best of several runs. Kinds of products that the device lacks, or that do not fit in memory, are left
    out.
    """
    part_seconds = budget_seconds / _PARTS
    size = _GPU_SIZE if device.type == "cuda" else _CPU_SIZE
    products, before = {}, torch.get_float32_matmul_precision()
    for kind in ("half", "tf32", "fp32"):
        if kind == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
            continue
        torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
        with contextlib.suppress(RuntimeError):
            products[kind] = _product_flops(kind, size, device, part_seconds)
    torch.set_float32_matmul_precision(before)
    # A launch and a dispatch are timed with an operation on one element. A partial function is as fast as the method.
    add_one = functools.partial(torch.zeros(1, device=device).add_, 1)
    kernel_seconds, dispatch_seconds = _best_seconds(add_one, [device], part_seconds, _LAUNCHES)
    return Calibration(size, products, _bytes_per_second(device, part_seconds), kernel_seconds, dispatch_seconds)


def _product_flops(kind: str, size: int, device: torch.device, seconds: float) -> float:
    """Return the measured FLOPs per second of products of two square matrices of ``size`` rows, within ``seconds``."""
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    one = torch.randn((size, size), device=device, dtype=half if kind == "half" else torch.float32)
    other, result = one.clone(), torch.empty_like(one)
    # On the GPU a single product in float32 may take most of the part's time.
    together = _RUN_TOGETHER if kind != "fp32" else 1
    return 2 * size**3 / _best_seconds(lambda: torch.matmul(one, other, out=result), [device], seconds, together)[0]


def _bytes_per_second(device: torch.device, seconds: float) -> float | None:
    """Return the bytes that an addition reads and writes per second; ``None`` where its three tensors do not fit."""
    size_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    try:
        one = torch.ones(size_bytes // 4, device=device)
        other, result = one.clone(), torch.empty_like(one)
    except RuntimeError:
        return None
    run_seconds, _ = _best_seconds(lambda: torch.add(one, other, out=result), [device], seconds, _RUN_TOGETHER)
    return 3 * size_bytes / run_seconds


def _best_seconds(
    work: Callable[[], object], devices: Sequence[torch.device], seconds: float, together: int
) -> tuple[float, float]:
    """Repeat ``work`` for some ``seconds``; return the shortest time of a run, and the shortest to issue one.

    Both are means over ``together`` runs, which are issued before the devices are waited for.
    """
    # The first run, which loads kernels, is not timed.
    work()
    _synchronize_all(devices)
    run_seconds, issue_seconds, deadline = float("inf"), float("inf"), time.perf_counter() + seconds
    while True:
        began_at = time.perf_counter()
        for _ in range(together):
            work()
        issue_seconds = min(issue_seconds, (time.perf_counter() - began_at) / together)
        _synchronize_all(devices)
        run_seconds = min(run_seconds, (time.perf_counter() - began_at) / together)
        if time.perf_counter() > deadline:
            return run_seconds, issue_seconds


# Sizes of the exchange between GPUs: what DDP reduces at once (its ``bucket_cap_mb``), and ten times as much. The fixed
# time of a call follows from the two.
_EXCHANGED_BYTES = (25 * 2**20, 250 * 2**20)
_EXCHANGE_SECONDS = 0.2
"""Time to measure each size."""
_MOST_SECONDS = 20.0
"""Time limit of the exchanges together. One that hangs is left to a trial, which has a time limit and reports it."""


def collectives(ranks: int) -> dict[str, Collective]:
    """Measure NCCL's collectives between as many GPUs as ``ranks``, driven by this process: fixed seconds, and rate.

    The result has ``all_reduce`` and ``all_gather`` of all ranks and, where ranks form groups, ``group_gather`` of one.
    """
    nccl: Any = importlib.import_module("torch.cuda.nccl")

    def timed(gpus: int, size_bytes: int, *, gathers: bool) -> float:
        """Return the seconds of an exchange of ``size_bytes``: an all-gather or an all-reduce."""
        devices = [torch.device("cuda", index) for index in range(gpus)]
        part = size_bytes // 4 // gpus
        whole = [torch.zeros(part * gpus, device=device) for device in devices]
        if not gathers:
            return _best_seconds(lambda: nccl.all_reduce(whole), devices, _EXCHANGE_SECONDS, _RUN_TOGETHER)[0]
        parts = [torch.zeros(part, device=device) for device in devices]
        return _best_seconds(lambda: nccl.all_gather(parts, whole), devices, _EXCHANGE_SECONDS, _RUN_TOGETHER)[0]

    found = {}
    for name, gpus in (("all_reduce", ranks), ("all_gather", ranks), ("group_gather", group_size(ranks))):
        if gpus is not None:
            gathers = name != "all_reduce"
            few_seconds, many_seconds = (timed(gpus, size, gathers=gathers) for size in _EXCHANGED_BYTES)
            # In a ring of n each sends (n - 1) / n of the bytes to gather them, and as many before to sum them up.
            few_sent, many_sent = ((1 if gathers else 2) * (gpus - 1) / gpus * size for size in _EXCHANGED_BYTES)
            rate = (many_sent - few_sent) / (many_seconds - few_seconds)
            found[name] = Collective(max(0.0, few_seconds - few_sent / rate), rate)
    return found


def _with_time_limit(seconds: float, measure: Callable[[], T]) -> T | None:
    """Return the result of a measurement; ``None`` where it fails, or exceeds its time and goes on in its thread."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(measure())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _synchronize_all(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    serve_one_job(GpuWork, gpu_facts)
