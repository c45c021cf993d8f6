"""Simulate a meter whose time and memory the test controls."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from autotune.core.real_training import PeakBytes
from autotune.worker.trial.meter import Meter
from autotune.worker.trial.step_checks import StepChecks


def unwatched() -> StepChecks:
    """Checks that see nothing, and so refuse no step."""

    def refuse(found: Any) -> NoReturn:
        raise found

    checks = StepChecks("a test", None, refuse)
    checks.watch.remove()
    return checks


class FakeClock:
    """Stands in for the module ``time``: it moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Allocation:
    """Memory that is given back when nobody refers to it any more."""

    def __init__(self, meter: FakeMeter, size_bytes: int) -> None:
        self._meter, self._size_bytes = meter, size_bytes
        meter.held_bytes += size_bytes

    def __del__(self) -> None:
        self._meter.held_bytes -= self._size_bytes


class FakeMeter(Meter):
    """Reserves a tenth more than is allocated."""

    def __init__(self, clock: FakeClock) -> None:
        self.device = torch.device("cpu")
        self.held_bytes = 0
        self.synchronized = 0
        self.watts = 300.0
        self._clock = clock
        self._peak_bytes = 0
        self._cap_bytes: int | None = None

    def allocate(self, size_bytes: int) -> Allocation:
        """Take memory; a ``MemoryError`` beyond the limit."""
        if self._cap_bytes is not None and self.held_bytes + size_bytes > self._cap_bytes:
            raise MemoryError(f"Unable to allocate {size_bytes} bytes")
        allocation = Allocation(self, size_bytes)
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        return allocation

    def limit(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes

    def synchronize(self) -> None:
        self.synchronized += 1

    def mark(self) -> float:
        return self._clock.now

    def reset_peaks(self) -> None:
        self._peak_bytes = self.held_bytes

    def peaks(self) -> PeakBytes:
        return PeakBytes(self._peak_bytes, self._peak_bytes * 11 // 10)

    def allocation_retries(self) -> int | None:
        return 3

    def device_used_bytes(self) -> int | None:
        return 2 * self.held_bytes

    def energy_joules(self) -> float | None:
        return self.watts * self._clock.now
