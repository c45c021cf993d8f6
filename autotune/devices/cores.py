"""Choose the CPU core for a pinned training process: near its GPU, and a different one for each GPU."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from autotune.devices.nvml import current_session

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_CPUS = Path("/sys/devices/system/cpu")


def can_pin() -> bool:
    """Return whether the system lets a process choose its cores (Linux does, macOS does not)."""
    return hasattr(os, "sched_setaffinity")


def usable_core_numbers() -> tuple[int, ...]:
    """Return the numbers of the cores that this thread may use, ascending; empty where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if can_pin() else ()


def core_for(uuid: str, usable: Collection[int]) -> int | None:
    """Return the core for the training process of one GPU, always the same one; ``None`` where none is usable."""
    gpu_index, bus_id = current_session().location(uuid)
    return choose_core(
        usable, near=local_cores(bus_id), second_threads=second_threads(usable), gpu_index=gpu_index or 0
    )


def choose_core(
    usable: Collection[int], *, near: Collection[int] = (), second_threads: Collection[int] = (), gpu_index: int = 0
) -> int | None:
    """Return one of the ``usable`` cores, if possible one that no other GPU's process gets; ``None`` without any.

    ``near`` are the cores of the GPU's NUMA node, empty where it is unknown. ``second_threads`` are hardware threads
    that share a physical core with another one. Core 0 is avoided, since the kernel does more of its own work there.
    """
    cores = sorted(usable)
    for preferred in (
        [core for core in cores if core in near],
        [core for core in cores if core not in second_threads],
        [core for core in cores if core != 0],
    ):
        # A condition that no core meets is dropped.
        cores = [core for core in cores if core in preferred] or cores
    return cores[gpu_index % len(cores)] if cores else None


def local_cores(bus_id: str | None, folder: Path = _PCI_DEVICES) -> tuple[int, ...]:
    """Return the cores of a PCI device's NUMA node; empty where the system does not tell.

    NVML writes a PCI domain with eight digits, the kernel with four or more: ``00000000:1B:00.0``, ``0000:1b:00.0``.
    """
    domain, _, rest = (bus_id or "").lower().partition(":")
    try:
        return parse_cores((folder / f"{int(domain, 16):04x}:{rest}" / "local_cpulist").read_text())
    except (OSError, ValueError):
        return ()


def second_threads(cores: Iterable[int], folder: Path = _CPUS) -> frozenset[int]:
    """Return the hardware threads of the physical cores of ``cores``, but for the first thread of each of these."""
    second_threads: set[int] = set()
    for core in cores:
        try:
            siblings = parse_cores((folder / f"cpu{core}" / "topology" / "thread_siblings_list").read_text())
        except (OSError, ValueError):
            continue
        second_threads.update(sibling for sibling in siblings if sibling > min(siblings))
    return frozenset(second_threads)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a kernel's list of cores, ``0-3,8,10-11``; raises ``ValueError`` for anything else."""
    cores: list[int] = []
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)
