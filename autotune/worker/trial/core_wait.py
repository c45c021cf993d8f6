"""Measure how long a trial waits for cores that other processes use, from the kernel's scheduler statistics."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from time import perf_counter

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class CoreWait:
    """Adds up, over the measured steps, the time in which threads of this process were ready and had no core.

    The second number of ``/proc/self/task/*/schedstat`` has it, in nanoseconds (Linux,
    Documentation/scheduler/sched-stats.rst).
    """

    def __init__(self) -> None:
        self._waited: Counter[str] = Counter()
        self._seconds = 0.0
        self._before: tuple[Counter[str], float] | None = None
        self._others_before: float | None = None
        self._throttled_before: str | None = None

    def read(self) -> None:
        """Read the statistics before a measured step."""
        if self._others_before is None:
            self._others_before, self._throttled_before = _seconds_of_others(), _throttled()
        self._before = _waited(), perf_counter()

    def add(self) -> None:
        """Add the waits of a measured step."""
        if self._before is not None:
            waited, began = self._before
            self._waited += _waited() - waited
            self._seconds += perf_counter() - began

    def share(self) -> float | None:
        """Return the share of the measured time in which the thread that waited longest had no core.

        No more than what processes outside of this one's group can have taken. ``None`` where the kernel does not
        tell, and where a limit of the container's stopped this process.
        """
        after = _seconds_of_others()
        if after is None or self._others_before is None or not self._seconds or _throttled() != self._throttled_before:
            return None
        longest = max(self._waited.values(), default=0) / 1e9
        return min(1.0, longest / self._seconds, max(0.0, after - self._others_before) / self._seconds)


def _waited() -> Counter[str]:
    """Return the nanoseconds that each thread of this process has waited for a core."""
    waited: Counter[str] = Counter()
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited[task.parent.name] = int(task.read_text().split()[1])
        except (OSError, IndexError):
            # It has ended, or the kernel keeps no statistics.
            continue
    return waited


def _seconds_of_others() -> float | None:
    """Return the CPU seconds of all processes but those of this one's group; ``None`` where they are not known."""
    try:
        busy = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    # user, nice, system, irq, softirq (proc(5)).
    ticks = sum(busy[place] for place in (0, 1, 2, 5, 6))
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == os.getpgrp():
            # With those of its children that have ended.
            ticks -= sum(map(int, fields[11:15]))
    return ticks / _TICKS_A_SECOND


def _throttled() -> str | None:
    """Return how often a CPU limit of this container has stopped it."""
    try:
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith("nr_throttled")), None)
