"""Check this machine for what would keep a search from starting or from measuring well (``autotune doctor``)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.core.device import Device
from autotune.core.units import GIB, MIB, format_bytes
from autotune.devices.cores import usable_core_numbers
from autotune.devices.host import ROOT, host_memory, physical_memory_bytes
from autotune.devices.listing import VISIBLE, amd_gpu, list_devices
from autotune.devices.nvml import current_session, nvml_problem

State = Literal["ok", "note", "wrong"]
"""``note`` costs speed or a choice; ``wrong`` keeps a search from starting, or ruins what it measures."""

# NVIDIA, "CUDA Compute Capability" (FP8 of tensor cores); the README of flash-attn: Ampere or newer.
_FP8 = (8, 9)
_FLASH = (8, 0)
# Docker gives a container 64 MiB. Samples of workers of a DataLoader pass through it. A choice.
_LEAST_SHARED_BYTES = 256 * MIB
# Of host memory: about what a process with torch, transformers and CUDA takes. Of disk: logs and a database. Choices.
_LEAST_HOST_BYTES = 2 * GIB
_LEAST_DISK_BYTES = GIB // 2
# Of a GPU's memory that other processes hold. A desktop takes less than the first. Choices.
_HELD_SHARE, _TOO_MUCH_HELD_SHARE = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class Check:
    """One finding about the machine."""

    name: str
    """What was looked at, in a word or two."""
    state: State
    """``ok``; ``note``: it costs speed or a choice; ``wrong``: no search starts, or what it measures is spoilt."""
    found: str
    """What was found."""
    cure: str | None = None
    """What to do; ``None`` where nothing is needed."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What ``autotune doctor --json`` prints."""

    ready: bool
    """Whether nothing is wrong; notes do not count."""
    checks: tuple[Check, ...]


def gpu_checks(uuids: Collection[str] | None = None, root: Path = ROOT) -> Iterator[Check]:
    """Yield checks of NVML and of each GPU, or only of the GPUs with these UUIDs."""
    devices = list_devices()
    gpus = [device for device in devices if device.kind == "cuda"]
    problem, hidden = nvml_problem(), os.environ.get(VISIBLE)
    if problem is not None:
        yield Check("NVML", "wrong", problem, "nvidia-smi shows the same where the driver is at fault: restart it")
    elif gpus:
        yield Check("NVML", "ok", f"driver {gpus[0].driver or 'unknown'}, {len(gpus)} visible")
    elif hidden is not None:
        yield Check("GPU", "note", f"{VISIBLE}={hidden!r} shows none: searches use the CPU", f"unset {VISIBLE}")
    elif (root / "proc/driver/nvidia").exists():
        found = "the NVIDIA driver is loaded, and its library libnvidia-ml.so.1 is not found"
        yield Check("NVML", "wrong", found, "start a container with --gpus all, or put the library on LD_LIBRARY_PATH")
    elif (sign := amd_gpu(root)) is not None:
        yield Check("GPU", "wrong", f"AMD GPUs are not supported ({sign})", "name --device cpu to search on the CPU")
    else:
        yield Check("GPU", "ok", "none: searches use the CPU")
    for gpu in gpus:
        if not uuids or gpu.uuid in uuids:
            yield from _of_gpu(gpu)


def _of_gpu(gpu: Device) -> Iterator[Check]:
    """Yield checks of a GPU: its capabilities, the processes that hold its memory, throttling."""
    name = gpu.label
    features: list[str] = [*gpu.precisions]
    if gpu.capability is not None:
        features += [word for word, least in (("fp8", _FP8), ("flash attention", _FLASH)) if gpu.capability >= least]
    capability = ".".join(map(str, gpu.capability)) if gpu.capability else "unknown"
    found = (
        f"{gpu.name}, {format_bytes(gpu.memory_total_bytes)}, compute capability {capability}: {', '.join(features)}"
    )
    if gpu.mig_uuids is not None:
        named = " or ".join(f"--device {uuid}" for uuid in gpu.mig_uuids) or "nvidia-smi mig -cgi makes instances"
        state: State = "note" if gpu.mig_uuids else "wrong"
        yield Check(name, state, f"{found}; split into {len(gpu.mig_uuids)} MIG instances", named)
    elif gpu.capability is not None and "bf16" not in gpu.precisions:
        yield Check(name, "note", f"{found}; no bf16", "models whose weights are in bf16 train in fp16 or fp32 here")
    else:
        yield Check(name, "ok", found)
    held_share = (gpu.memory_used_bytes or 0) / max(1, gpu.memory_total_bytes)
    if held_share > _HELD_SHARE and gpu.mig_uuids is None:
        who = ", ".join(
            f"{process.name or '?'} ({process.pid}"
            + (")" if process.used_bytes is None else f", {format_bytes(process.used_bytes)})")
            for process in gpu.neighbours
        )
        yield Check(
            f"{name} memory",
            "wrong" if held_share > _TOO_MUCH_HELD_SHARE else "note",
            f"{format_bytes(gpu.memory_used_bytes or 0)} are held by {who or 'processes without a name here'}",
            "end them, choose another GPU with --device, or give --memory-limit",
        )
    condition = current_session().condition(gpu.uuid)
    if condition is None:
        return
    if condition.is_lost:
        yield Check(f"{name} state", "wrong", "the GPU is lost", "restart the machine")
    if condition.uncorrected_errors:
        found = f"{condition.uncorrected_errors} uncorrected memory errors since the driver was loaded"
        yield Check(f"{name} state", "wrong", found, "have the GPU checked, and use another one")
    if condition.slowdowns:
        found = f"{' and '.join(condition.slowdowns)} at {condition.temperature_celsius} °C"
        yield Check(f"{name} state", "note", found, "see to its cooling and power: speeds are below what it can do")


def host_checks(root: Path = ROOT) -> Iterator[Check]:
    """Yield checks of main memory and its control group limits, shared memory, and cores."""
    memory, physical_bytes = host_memory(root), physical_memory_bytes(root)
    found = f"{format_bytes(memory.total_bytes)}"
    if memory.free_bytes is not None:
        found += f", {format_bytes(memory.free_bytes)} free"
    if memory.total_bytes < physical_bytes:
        found += f"; a control group allows that of {format_bytes(physical_bytes)}"
    if memory.free_bytes is not None and memory.free_bytes < _LEAST_HOST_BYTES:
        cure = "end other programs, or start the container with more memory"
        yield Check("memory", "wrong", found, cure)
    else:
        yield Check("memory", "ok", found)
    shared = root / "dev/shm"
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        found = f"{format_bytes(usage.total)}, {format_bytes(usage.free)} free"
        if usage.free < _LEAST_SHARED_BYTES:
            found += ": loading processes end with a bus error when it is full"
            yield Check("/dev/shm", "wrong", found, "docker run --shm-size 8g, or --ipc=host")
        else:
            yield Check("/dev/shm", "ok", found)
    usable, there = len(usable_core_numbers()) or os.cpu_count() or 1, os.cpu_count() or 1
    found = f"{usable} of {there}" if usable < there else f"{usable}"
    if (quota := cpu_quota(root)) is not None and quota < usable:
        cure = "allow more, or as many cores as that with --cpuset-cpus: threads are stopped when it is used up"
        yield Check("cores", "note", f"{found}, of which a control group allows the time of {quota:g}", cure)
    else:
        yield Check("cores", "ok", found)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many cores' time the container's CPU quota allows, which may be a fraction; ``None`` without a quota.

    Linux kernel documentation, admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst.
    """
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        folder = root / "sys/fs/cgroup/cpu"
        try:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
        except OSError:
            return None
    return int(quota) / int(period) if quota.isdecimal() and int(period) else None


def disk_check(name: str, folder: Path) -> Check:
    """Return a check of the free disk space of a folder, which may not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    found = f"{format_bytes(free_bytes)} free in {folder}"
    if not os.access(existing, os.W_OK):
        return Check(name, "wrong", f"{existing} cannot be written to", "name another place with --storage or TMPDIR")
    if free_bytes < _LEAST_DISK_BYTES:
        return Check(name, "wrong", found, "make room there, or name another place with --storage or TMPDIR")
    return Check(name, "ok", found)
