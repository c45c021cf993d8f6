"""Pin a training process to one CPU core, and measure how long a trial waits for cores that other processes use.

The forward pass runs in the main thread and the backward pass in autograd's thread, never both at once. On one core
neither has to wake up the other on a second core, which made host-bound steps faster and their speed repeatable.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch

from autotune.devices.cores import core_for, usable_core_numbers
from autotune.worker.wrapping import around

# Upper limit of inductor's own choice (torch/_inductor/config.py, decide_compile_threads).
_MOST_COMPILE_THREADS = 32


def pin_to_one_core(device_uuid: str, core: int | None = None) -> int | None:
    """Pin every thread of this process, present and future, to one core; return its number.

    ``core`` is used if this process may use it, else a core is chosen for the device. Processes started from now on,
    such as data loader workers and inductor's compilers, may use all cores again. Returns ``None`` where the system
    cannot pin. Call it before CUDA is opened and before torch computes anything.
    """
    usable = usable_core_numbers()
    chosen = core if core in usable else core_for(device_uuid, usable)
    if chosen is None:
        return None
    # inductor derives this number from the cores that it sees when it is imported, which are not all once pinned.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(_MOST_COMPILE_THREADS, len(usable))))
    # Threads that wait for each other on one core are slow: stacking 16 images took 280 ms with two threads and 0.26 ms
    # with one. One is also what torch chooses under ``taskset -c``.
    torch.set_num_threads(1)

    def unpinned(start: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call ``start``, which starts a program, with this thread allowed to use all cores meanwhile."""
        before = os.sched_getaffinity(0)
        _allow(usable)
        try:
            return start(*arguments, **keywords)
        finally:
            _allow(before)

    os.register_at_fork(after_in_child=lambda: _allow(usable))
    # A started program inherits the cores of the thread that starts it, and no hook runs in between.
    around(subprocess.Popen, "__init__", unpinned)
    # multiprocessing starts processes that it does not fork, and its fork server, through this function.
    around(multiprocessing.util, "spawnv_passfds", unpinned)
    # Threads that these threads start inherit the pinning.
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        # A thread may have ended meanwhile.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), {chosen})
    os.sched_setaffinity(0, {chosen})
    return chosen


def _allow(cores: Collection[int]) -> None:
    """Allow this thread to use these cores, if the system has them."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)


class CoreWait:
    """Adds up, over the measured steps, the time in which threads of this process were ready to run but had no core.

    The time is the second number of ``/proc/self/task/*/schedstat``, in nanoseconds (Linux,
    Documentation/scheduler/sched-stats.rst).
    """

    def __init__(self) -> None:
        self._waited: Counter[str] = Counter()
        """Nanoseconds that each thread waited in the measured steps."""
        self._measured_seconds = 0.0
        self._before_step: tuple[Counter[str], float] | None = None
        self._others_before: float | None = None
        self._throttled_before: str | None = None

    def read(self) -> None:
        """Read the scheduler's statistics before a measured step."""
        if self._others_before is None:
            self._others_before, self._throttled_before = _seconds_of_others(), _throttled()
        self._before_step = _waited(), perf_counter()

    def add(self) -> None:
        """Add the waits during a measured step."""
        if self._before_step is not None:
            waited_before, began_at = self._before_step
            self._waited += _waited() - waited_before
            self._measured_seconds += perf_counter() - began_at

    def share(self) -> float | None:
        """Return the share of the measured time in which the longest waiting thread had no core.

        It is limited to the share in which other process groups ran, which alone can take cores. ``None`` where the
        kernel does not provide it, and where a CPU limit of the container stopped this process.
        """
        after, before, seconds = _seconds_of_others(), self._others_before, self._measured_seconds
        if after is None or before is None or not seconds or _throttled() != self._throttled_before:
            return None
        longest_seconds = max(self._waited.values(), default=0) / 1e9
        return min(1.0, longest_seconds / seconds, max(0.0, after - before) / seconds)


def _waited() -> Counter[str]:
    """Return the nanoseconds that each thread of this process has waited for a core."""
    waited: Counter[str] = Counter()
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited[task.parent.name] = int(task.read_text().split()[1])
        except (OSError, IndexError):
            # The thread has ended, or the kernel keeps no statistics.
            continue
    return waited


def _seconds_of_others() -> float | None:
    """Return the CPU seconds of all processes outside of this one's process group; ``None`` where unknown."""
    try:
        times, own = psutil.cpu_times(), os.getpgrp()
    except (OSError, ValueError):
        return None
    seconds = times.user + times.nice + times.system + times.irq + times.softirq
    for pid in psutil.pids():
        # A process may have ended meanwhile.
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == own:
                # User and system time, with those of its children that have ended.
                seconds -= sum(psutil.Process(pid).cpu_times()[:4])
    return float(seconds)


def _throttled() -> str | None:
    """Return the ``nr_throttled`` line of this container's CPU statistics, which changes when its CPU limit stops it.

    ``None`` where there is none.
    """
    try:
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith("nr_throttled")), None)
