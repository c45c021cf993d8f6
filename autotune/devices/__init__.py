"""Read facts about the GPUs and the CPU of this machine, without torch.

``nvml`` reads the GPUs, ``host`` the CPU and its memory, ``listing`` finds the devices that this process may use. The
values are in ``autotune.core.device`` and ``autotune.core.ceiling``. Importing this package loads nothing but the
standard library; NVML is opened by the first question about a GPU.
"""

from __future__ import annotations

from autotune.core.ceiling import Ceiling, Headroom, parse_headroom
from autotune.core.device import CAPABILITY_VARIABLE, CPU_UUID, Device, DeviceKind, Neighbour, Precision
from autotune.devices.condition import Condition, GpuPolicy
from autotune.devices.host import machine_id, processor_name
from autotune.devices.listing import devices_of_ranks, find_device, find_gpus, list_devices
from autotune.devices.nvml import (
    busy_pids,
    device_condition,
    device_energy_joules,
    device_used_bytes,
    gpu_links,
    gpu_number,
    gpu_policy,
    nvml_problem,
    own_used_bytes,
)

__all__ = [
    "CAPABILITY_VARIABLE",
    "CPU_UUID",
    "Ceiling",
    "Condition",
    "Device",
    "DeviceKind",
    "GpuPolicy",
    "Headroom",
    "Neighbour",
    "Precision",
    "busy_pids",
    "device_condition",
    "device_energy_joules",
    "device_used_bytes",
    "devices_of_ranks",
    "find_device",
    "find_gpus",
    "gpu_links",
    "gpu_number",
    "gpu_policy",
    "list_devices",
    "machine_id",
    "nvml_problem",
    "own_used_bytes",
    "parse_headroom",
    "processor_name",
]
