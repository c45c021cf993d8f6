"""List the devices that this process may use, and find the one that a user named."""

from __future__ import annotations

import os
import re

from autotune.core.device import Device
from autotune.core.errors import DeviceError, InvalidRequestError
from autotune.devices.host import cpu_device
from autotune.devices.nvml import current_session, nvml_problem

VISIBLE = "CUDA_VISIBLE_DEVICES"


def list_devices() -> tuple[Device, ...]:
    """Return the GPUs that are visible to this process, then the CPU.

    ``CUDA_VISIBLE_DEVICES`` chooses the GPUs and their order; without it they are in nvidia-smi's order. CUDA itself
    would put the fastest first where GPUs differ, which cannot be known without a CUDA context. So a trial is given its
    GPU by UUID, never by index. ``nvml_problem`` says why a GPU may be missing.
    """
    return (*current_session().devices(os.environ.get(VISIBLE)), cpu_device())


def find_device(text: str | None) -> Device:
    """Return the device named by ``cuda``, ``cuda:1``, ``cpu``, or the UUID of a GPU or its beginning.

    ``None`` means the first visible GPU, or the CPU where there is none. Raises ``InvalidRequestError`` for text of
    another form, and ``DeviceError`` where there is no such device.
    """
    wanted = None if text is None else text.strip()
    if wanted is not None and not re.fullmatch(r"cpu|cuda(:\d+)?|(GPU|MIG)-[\w/-]+", wanted, flags=re.ASCII):
        raise InvalidRequestError(f"{text!r} is not a device", "write cpu, cuda, cuda:N or the UUID of a GPU")
    devices = list_devices()
    if wanted is None:
        return devices[0]
    matches = [device for device in devices if _means(wanted, device)]
    if len(matches) != 1:
        raise DeviceError(
            f"{wanted} matches {len(matches)} devices" if matches else f"there is no device {wanted}",
            _what_there_is(devices),
        )
    return matches[0]


def _means(wanted: str, device: Device) -> bool:
    if wanted.startswith(("GPU-", "MIG-")):
        return device.uuid.startswith(wanted)
    kind, _, number = wanted.partition(":")
    return device.kind == kind and (kind == "cpu" or device.index == int(number or 0))


def _what_there_is(devices: tuple[Device, ...]) -> str:
    """Return the hint for a device that does not exist: those that do, and what may hide others."""
    hint = "choose from " + ", ".join(f"{device.label} ({device.name})" for device in devices)
    if VISIBLE in os.environ:
        hint += f", or change {VISIBLE}={os.environ[VISIBLE]!r}, which hides the other GPUs"
    problem = nvml_problem()
    return f"{hint}; {problem}" if problem else hint
