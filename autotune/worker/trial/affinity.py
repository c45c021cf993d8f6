"""Pin a training process to one CPU core, and let its child processes use all of them.

The forward pass runs in the main thread and the backward pass in autograd's thread, never both at once. On one core
neither has to wake up the other on a second core, which made host-bound steps faster and their speed repeatable.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from autotune.devices.cores import core_for, usable_core_numbers
from autotune.worker.wrapping import around

# Upper limit of inductor's own choice (torch/_inductor/config.py, decide_compile_threads).
_MOST_COMPILE_THREADS = 32


def pin_to_one_core(device_uuid: str, core: int | None = None) -> int | None:
    """Pin every thread of this process, present and future, to one core; return its number.

    ``core`` is used if this process may use it, else one is chosen for the device. Processes started from now on, such
    as data loader workers and inductor's compilers, may use all cores again. Returns ``None`` where the system cannot
    pin. Call it before CUDA is opened and before torch computes anything.
    """
    usable = usable_core_numbers()
    chosen = core if core in usable else core_for(device_uuid, usable)
    if chosen is None:
        return None
    # inductor derives the number from the cores that it sees when it is imported; it should see all of them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(_MOST_COMPILE_THREADS, len(usable))))
    # Threads that wait for each other on one core are slow: stacking 16 images took 280 ms with two threads and 0.26 ms
    # with one. One is also what torch chooses under ``taskset -c``.
    torch.set_num_threads(1)
    _free_children(usable)
    # Threads that these start inherit it.
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        # A thread may have ended meanwhile.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), {chosen})
    os.sched_setaffinity(0, {chosen})
    return chosen


def _free_children(all_cores: Collection[int]) -> None:
    """Let processes that are forked or started from now on use all cores."""

    def unpinned(start: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        before = os.sched_getaffinity(0)
        _allow(all_cores)
        try:
            return start(*arguments, **keywords)
        finally:
            _allow(before)

    os.register_at_fork(after_in_child=lambda: _allow(all_cores))
    # A started program inherits the cores of the thread that starts it, and no hook runs in between.
    around(subprocess.Popen, "__init__", unpinned)
    # multiprocessing starts processes that it does not fork, and its fork server, through this function.
    around(multiprocessing.util, "spawnv_passfds", unpinned)


def _allow(cores: Collection[int]) -> None:
    """Let this thread use these cores, as far as the system still has them."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
