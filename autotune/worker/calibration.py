"""Measure what this machine's GPU and host do in half a second: matrix products, memory traffic, launches, dispatch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from autotune.core.chip import Calibration

BUDGET_SECONDS = 0.5
"""For all parts together; each stops at its share of it, but runs once at least."""
_PARTS = 6
# Large enough for a data centre GPU to reach its rate: 0.2 ms in 16 bits on an H200, 17 ms in float32 on a T4.
_GPU_SIZE = 4096
_CPU_SIZE = 256
_GPU_BYTES = 2**28
_CPU_BYTES = 2**22
_RUN_TOGETHER = 10
_LAUNCHES = 200


def calibrate(device: torch.device, budget_seconds: float = BUDGET_SECONDS) -> Calibration:
    """Return rates of square matrix products by kind, bytes a second, and seconds of a launch and of a dispatch.

    Each is the best of several runs. A kind of product that the device lacks, or for which there is no memory, is left
    out.
    """
    share = budget_seconds / _PARTS
    size = _GPU_SIZE if device.type == "cuda" else _CPU_SIZE
    products = {}
    for kind in ("half", "tf32", "fp32"):
        with contextlib.suppress(RuntimeError), _product_precision(kind, device):
            products[kind] = _product_flops(kind, size, device, share)
    kernel_seconds, dispatch_seconds = _small_operation_seconds(device, share)
    return Calibration(size, products, _bytes_per_second(device, share), kernel_seconds, dispatch_seconds)


@contextlib.contextmanager
def _product_precision(kind: str, device: torch.device) -> Iterator[None]:
    """Have float32 products computed in TF32 or not; raises ``RuntimeError`` for TF32 where there is none."""
    if kind == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise RuntimeError("no TF32")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product_flops(kind: str, size: int, device: torch.device, seconds: float) -> float:
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    one = torch.randn((size, size), device=device, dtype=half if kind == "half" else torch.float32)
    other, result = one.clone(), torch.empty_like(one)
    # On the GPU a product in float32 may take most of the time there is.
    together = _RUN_TOGETHER if kind != "fp32" else 1
    return 2 * size**3 / _best_seconds(lambda: torch.matmul(one, other, out=result), device, seconds, together)


def _bytes_per_second(device: torch.device, seconds: float) -> float | None:
    size_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    try:
        one = torch.ones(size_bytes // 4, device=device)
        other, result = one.clone(), torch.empty_like(one)
    except RuntimeError:
        return None
    return 3 * size_bytes / _best_seconds(lambda: torch.add(one, other, out=result), device, seconds, _RUN_TOGETHER)


def _small_operation_seconds(device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the seconds of an operation on one element: until it has run, and until it was issued."""
    value = torch.zeros(1, device=device)
    run, issued, deadline = float("inf"), float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        for _ in range(_LAUNCHES):
            value.add_(1)
        issued = min(issued, (time.perf_counter() - started) / _LAUNCHES)
        _wait(device)
        run = min(run, (time.perf_counter() - started) / _LAUNCHES)
        if time.perf_counter() > deadline:
            return run, issued


def _best_seconds(work: Callable[[], object], device: torch.device, seconds: float, together: int) -> float:
    """Return the shortest time of one run, of several in a row that are waited for together."""
    work()
    _wait(device)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        for _ in range(together):
            work()
        _wait(device)
        best = min(best, (time.perf_counter() - started) / together)
        if time.perf_counter() > deadline:
            return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
