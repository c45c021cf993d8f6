"""Describe the CPU as a device: its name, its precisions, and the memory that this process may use.

``root`` is the folder that stands for ``/``, so that tests can read recorded files. Without /proc (macOS)
less is known: ``os.sysconf`` gives the total, and the free memory is ``None``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from autotune.core.device import CPU_UUID, Device

ROOT = Path("/")

# CPU features in /proc/cpuinfo, under "flags" on x86 and under "Features" on ARM, with which oneDNN and ACL (used by
# torch) multiply bfloat16 without converting it to fp32 first.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Main memory that this process may use, with the limits of control groups."""

    total_bytes: int
    free_bytes: int | None
    """Memory available without swapping; the file cache counts as free."""


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """Where one version of the kernel's control groups keeps its memory limits: folder and file names."""

    controller: str
    """The name in /proc/self/cgroup; version 2 has none."""
    folder: str
    limit: str
    usage: str
    inactive_file: str
    """The line of ``memory.stat`` with the file cache of the group and all groups below it."""
    events: str
    """The file with a line ``oom_kill``."""


# Linux kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. The folders are where systemd, Docker
# and Kubernetes mount them. Where both versions are mounted, either may hold the limit.
_MEMORY_GROUPS = (
    _MemoryGroup("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "memory.events"),
    _MemoryGroup(
        "memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
        "memory.oom_control",
    ),
)  # fmt: skip


def cpu_device(root: Path = ROOT) -> Device:
    """Return the CPU, with all its cores, as one device of this machine."""
    memory = host_memory(root)
    processor = _processor_facts(root)
    flags = f"{processor.get('flags', '')} {processor.get('Features', '')}".split()
    return Device(
        kind="cpu",
        index=None,
        uuid=CPU_UUID,
        name=_name_of(processor),
        memory_total_bytes=memory.total_bytes,
        memory_reserved_bytes=None,
        memory_used_bytes=None if memory.free_bytes is None else memory.total_bytes - memory.free_bytes,
        memory_free_bytes=memory.free_bytes,
        native_bf16=not _BF16_FLAGS.isdisjoint(flags),
    )


def processor_name(root: Path = ROOT) -> str:
    """Return the model name of the host's processor; the architecture or ``CPU`` where it is unknown."""
    processor = _processor_facts(root)
    # /proc/cpuinfo has no model name of ARM processors, only the numbers of their maker and design.
    design = [processor[fact] for fact in ("CPU implementer", "CPU part") if fact in processor]
    return " ".join([_name_of(processor), *(design if "model name" not in processor else [])])


def machine_id(root: Path = ROOT) -> str:
    """Return a hash that identifies this host, from its machine-id and name.

    Containers of one image may share the machine-id, and hosts of several networks a name. The id itself is not
    revealed, as machine-id(5) asks.
    """
    import hashlib
    import platform

    try:
        machine_id = (root / "etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        machine_id = ""
    return hashlib.sha256(f"autotune {machine_id} {platform.node()}".encode()).hexdigest()[:16]


def _name_of(processor: dict[str, str]) -> str:
    """Return the model name of a processor; the architecture or ``CPU`` where it is unknown."""
    import platform  # only this needs it, and ``autotune --help`` does not

    return processor.get("model name") or platform.processor() or platform.machine() or "CPU"


def host_memory(root: Path = ROOT) -> HostMemory:
    """Return the main memory that this process may use: the machine's, or less where a control group limits it."""
    # Read without psutil, which would take 18 ms to import.
    sizes = _numbers_by_name(root / "proc/meminfo", separator=":")
    total_bytes = physical_memory_bytes(root)
    free_bytes = sizes["MemAvailable"] * 1024 if {"MemTotal", "MemAvailable"} <= sizes.keys() else None
    for limit_bytes, left_bytes in _group_limits(root):
        total_bytes = min(total_bytes, limit_bytes)
        free_bytes = left_bytes if free_bytes is None else min(free_bytes, left_bytes)
    return HostMemory(total_bytes, None if free_bytes is None else max(0, min(free_bytes, total_bytes)))


def physical_memory_bytes(root: Path = ROOT) -> int:
    """Return the size of the machine's main memory, ignoring control groups."""
    kibibytes = _numbers_by_name(root / "proc/meminfo", separator=":").get("MemTotal")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kibibytes is None else kibibytes * 1024


def oom_kills(root: Path = ROOT) -> int | None:
    """Return how many processes the kernel has killed for lack of memory, to tell why a process was killed.

    They are counted in this process's control group or, without one, on the whole machine (/proc/vmstat). ``None``
    where neither count exists.
    """
    for group in _MEMORY_GROUPS:
        top = root / group.folder
        folders = [top, *(top / level for level in _levels(_group_path(root, group.controller) or "/"))]
        # The innermost group first: it has the fewest other processes.
        for folder in reversed(folders):
            kills = _numbers_by_name(folder / group.events, separator=" ").get("oom_kill")
            if kills is not None:
                return kills
    return _numbers_by_name(root / "proc/vmstat", separator=" ").get("oom_kill")


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the free bytes of each control group of this process that limits memory.

    A limit holds for all groups below it, so every level counts. Inside a container, /proc/self/cgroup may show the
    host's path, of which the container sees only the end. Levels that do not exist are skipped; the mounted folder
    itself is then the container's own group.
    """
    for group in _MEMORY_GROUPS:
        path = _group_path(root, group.controller)
        if path is None:
            continue
        top = root / group.folder
        for folder in (top, *(top / level for level in _levels(path))):
            limit_bytes = _number(folder / group.limit)
            used_bytes = _number(folder / group.usage)
            if limit_bytes is None or used_bytes is None:
                continue
            cached_bytes = _numbers_by_name(folder / "memory.stat", separator=" ").get(group.inactive_file, 0)
            yield limit_bytes, limit_bytes - max(0, used_bytes - cached_bytes)


def _group_path(root: Path, controller: str) -> str | None:
    """Return the path of this process's control group, from lines ``id:controllers:path``; ``None`` without a group."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path
    return None


def _levels(path: str) -> Iterator[str]:
    """Yield the paths of a group and those around it: ``a``, ``a/b`` for ``/a/b``; none outside of the namespace."""
    parts = [part for part in PurePosixPath(path).parts if part != "/"]
    if ".." not in parts:
        for depth in range(1, len(parts) + 1):
            yield "/".join(parts[:depth])


def _processor_facts(root: Path) -> dict[str, str]:
    """Return the facts of the first processor in /proc/cpuinfo."""
    facts: dict[str, str] = {}
    for line in _lines(root / "proc/cpuinfo"):
        if not line:
            break
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    return facts


def _numbers_by_name(path: Path, *, separator: str) -> dict[str, int]:
    """Return numbers by name from lines such as ``MemTotal:  24 kB`` or ``inactive_file 4096``; units are ignored."""
    numbers: dict[str, int] = {}
    for line in _lines(path):
        name, _, rest = line.partition(separator)
        words = rest.split()
        if words and words[0].isdecimal():
            numbers[name] = int(words[0])
    return numbers


def _number(path: Path) -> int | None:
    """Return the only number in a file; ``None`` without the file, or where it has no number, such as ``max``."""
    text = next(_lines(path), "")
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file; none where it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.strip()
    except OSError:
        return
