"""Running a training process on one CPU core, and its child processes on all of them.

The forward pass runs in the main thread and the backward pass in autograd's, never both at once. On one core they take
turns without one waking another up on a second core, which made host-bound steps faster and their speed repeatable.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import os
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from autotune.devices.cores import core_for, usable_core_numbers

# The most that inductor itself takes (torch/_inductor/config.py, decide_compile_threads).
_MOST_COMPILE_THREADS = 32


def pin_to_one_core(device_uuid: str, core: int | None = None) -> int | None:
    """Pin every thread of this process, those of now and those to come, to one core; its number.

    ``core`` is taken if this process may use it, else one is chosen for the device. Processes that are started from now
    on get back all the cores that there were: loading processes and inductor's compilers. ``None`` where the system
    cannot pin. To be called before CUDA is opened and before torch computes anything.
    """
    usable = usable_core_numbers()
    chosen = core if core in usable else core_for(device_uuid, usable)
    if chosen is None:
        return None
    # Decided from the cores of the moment when it is imported, which must be all of them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(_MOST_COMPILE_THREADS, len(usable))))
    # Threads that wait for each other on one core are slow: stacking 16 images took 280 ms with two of them and 0.26 ms
    # with one. It is also the number that torch chooses under ``taskset -c``.
    torch.set_num_threads(1)
    _free_children(usable)
    _pin_threads({chosen})
    return chosen


def _pin_threads(cores: Collection[int]) -> None:
    """Pin all threads that there are; those that they start inherit it."""
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        # One may have ended meanwhile.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)
    os.sched_setaffinity(0, cores)


def _free_children(all_cores: Collection[int]) -> None:
    """Have processes that are forked or started from now on run on all cores."""
    os.register_at_fork(after_in_child=lambda: _allow(all_cores))
    # A program that is started inherits the cores of the thread that starts it; no hook runs in between.
    starting: Any = subprocess.Popen
    starting.__init__ = _unpinned(starting.__init__, all_cores)
    # How multiprocessing starts its processes where it does not fork them, and the server that forks them for it.
    util: Any = multiprocessing.util
    util.spawnv_passfds = _unpinned(util.spawnv_passfds, all_cores)


def _allow(cores: Collection[int]) -> None:
    """Let this thread run on these cores, where the system still has them."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)


def _unpinned(start: Callable[..., Any], all_cores: Collection[int]) -> Callable[..., Any]:
    """A function that runs on all cores for as long as it takes."""

    @functools.wraps(start)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        before = os.sched_getaffinity(0)
        _allow(all_cores)
        try:
            return start(*arguments, **keywords)
        finally:
            _allow(before)

    return wrapper
