"""List the devices that this process may use, and find the one that a user named."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.core.device import CPU_UUID, Device, Precision
from autotune.core.errors import DeviceError, InvalidRequestError
from autotune.core.schema import decode, encode, make_record, record_fields
from autotune.core.units import format_bytes
from autotune.devices.host import ROOT, cpu_device
from autotune.devices.nvml import current_session, nvml_problem

VISIBLE = "CUDA_VISIBLE_DEVICES"

_DEVICE = r"(?:cpu|cuda(?::\d{1,9})?|(?:GPU|MIG)-[\w/-]+)"
"""How a device is written, as a regular expression."""


def list_devices() -> tuple[Device, ...]:
    """Return the GPUs visible to this process, then the CPU.

    ``CUDA_VISIBLE_DEVICES`` chooses the GPUs and their order; without it they are in nvidia-smi's order. CUDA itself
    would put the fastest first where GPUs differ, which cannot be known without a CUDA context. So a trial is given its
    GPU by UUID, never by index. A GPU that is split into MIG instances is followed by its instances. ``nvml_problem``
    says why a GPU may be missing.
    """
    return (*current_session().devices(os.environ.get(VISIBLE)), cpu_device())


def find_device(text: str | None) -> Device:
    """Return the device named by ``cuda``, ``cuda:1``, ``cpu``, or the UUID of a GPU or its beginning.

    ``None`` means the first visible GPU, or the CPU where there is none. Raises ``InvalidRequestError`` for malformed
    text, and ``DeviceError`` for a missing device or a GPU that CUDA would replace by its MIG instance.
    """
    wanted = None if text is None else text.strip()
    if wanted is not None and not re.fullmatch(_DEVICE, wanted, flags=re.ASCII):
        several = "; several GPUs are named with --gpus, as in --gpus 0,1" if "," in wanted else ""
        raise InvalidRequestError(f"{text!r} is not a device", f"write cpu, cuda, cuda:N or the UUID of a GPU{several}")
    devices = list_devices()
    matches = [device for device in devices if wanted is None or _is_named(wanted, device)]
    if wanted != CPU_UUID:
        _check_is_nvidia(devices)
    if wanted is None:
        return _refuse_split_gpu(matches[0], devices)
    if len(matches) != 1:
        raise DeviceError(
            f"{wanted} matches {len(matches)} devices" if matches else f"there is no device {wanted}",
            _with_reasons("choose from " + ", ".join(f"{device.label} ({device.name})" for device in devices)),
        )
    return _refuse_split_gpu(matches[0], devices)


def _refuse_split_gpu(device: Device, devices: Sequence[Device]) -> Device:
    """Return ``device``; raise ``DeviceError`` for a GPU that is split into MIG instances, and name these.

    CUDA would use the first instance in place of the GPU.
    """
    if device.mig_uuids is None:
        return device
    instances = [other for other in devices if other.uuid in device.mig_uuids]
    choices = ", ".join(f"{other.uuid} ({other.name}, {format_bytes(other.memory_total_bytes)})" for other in instances)
    raise DeviceError(
        f"{device.label} ({device.name}) is split into MIG instances, and CUDA uses one at a time",
        f"choose one with --device: {choices}"
        if choices
        else "name one with --device; nvidia-smi -L lists their UUIDs",
    )


def _check_is_nvidia(devices: Sequence[Device]) -> None:
    """Raise ``DeviceError`` where the only GPU is AMD's: a search must not silently fall back to the CPU."""
    is_hidden = os.environ.get(VISIBLE, "all").strip() in ("", "-1")
    if any(device.kind == "cuda" for device in devices) or is_hidden:
        return
    sign = amd_gpu()
    if sign is not None:
        raise DeviceError(
            f"AMD GPUs (ROCm) are not supported, and there is no other GPU here ({sign})",
            _with_reasons("name --device cpu to search on the CPU"),
        )


def amd_gpu(root: Path = ROOT) -> str | None:
    """Return the sign of an AMD GPU on this machine, for messages: ``/dev/kfd`` or a torch for ROCm; else ``None``."""
    from importlib.metadata import PackageNotFoundError, version  # only a machine without NVIDIA's GPUs needs it

    if (root / "dev/kfd").exists():
        return "/dev/kfd"
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    return f"torch {installed}" if "rocm" in installed else None


def ranks_of(environment: Mapping[str, Any]) -> int:
    """Return how many processes trained together, from the environment that a study recorded."""
    ranks: int = (environment.get("ranks") or {}).get("world_size", 1)
    return ranks


def devices_of_ranks(
    environment: Mapping[str, Any], study: str, among: Sequence[Device] | None = None
) -> tuple[Device, ...]:
    """Return a device for each rank of a study that goes on: those of its recorded environment, else equal ones.

    They are chosen from ``among``, by default from this machine's devices; equal ones have the same product name.
    Raises ``DeviceError`` where there are too few. On a CPU all ranks share it.
    """
    ranks = ranks_of(environment)
    here = list_devices() if among is None else among
    name, uuids = environment.get("device_name"), environment.get("device_uuids") or [environment.get("device_uuid")]
    alike = [device for device in here if device.name == name and device.kind == environment.get("device_kind")]
    if alike and alike[0].kind == "cpu":
        return (alike[0],) * ranks
    same = [device for uuid in uuids for device in alike if device.uuid == uuid]
    devices = same if len(same) == ranks else alike[:ranks]
    if not devices and ranks == 1:
        raise DeviceError(
            f"the study {study!r} was searched on {name} ({uuids[0]}), which is not here",
            "name a device of the same kind with --device, or search anew under another --study",
        )
    if len(devices) < ranks:
        gone = [uuid for uuid in uuids if uuid not in {device.uuid for device in alike}]
        verb = "is" if len(alike) == 1 else "are"
        raise DeviceError(
            f"the study {study!r} was searched on {ranks} of {name}, and {len(alike) or 'none'} {verb} here"
            + (f": {' and '.join(gone)} {'is' if len(gone) == 1 else 'are'} missing" if gone else ""),
            _with_reasons("go on where they are, or search anew under another --study"),
        )
    return tuple(devices)


def find_gpus(text: str) -> tuple[Device, ...]:
    """Return the GPUs named by a count, ``all``, or a list such as ``0,2`` or ``cuda:0,GPU-…``.

    A count means the first visible GPUs. Raises the errors of ``find_device``.
    """
    devices = list_devices()
    _check_is_nvidia(devices)
    gpus = tuple(device for device in devices if device.index is not None)
    wanted = text.strip()
    if wanted == "all" or re.fullmatch(r"[0-9]{1,9}", wanted):
        count = len(gpus) if wanted == "all" else int(wanted)
        if wanted != "all" and count == 0:
            raise InvalidRequestError("--gpus 0 leaves nothing to train on", "use 1 or more, or --device cpu")
        if not gpus or count > len(gpus):
            there = "there is 1 GPU" if len(gpus) == 1 else f"there are {len(gpus) or 'no'} GPUs"
            hint = f"use --gpus {len(gpus)} or fewer" if gpus else "leave --gpus out to use the CPU"
            raise DeviceError(f"--gpus {wanted}: {there} here", _with_reasons(hint))
        return tuple(_refuse_split_gpu(gpu, devices) for gpu in gpus[:count])
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    no_gpus = InvalidRequestError(f"--gpus {text!r} names no GPUs", "write a number of them, all, or a list: 0,1")
    if not names or not all(re.fullmatch(rf"\d{{1,9}}|{_DEVICE}", name, flags=re.ASCII) for name in names):
        raise no_gpus
    found = tuple(find_device(f"cuda:{name}" if name.isascii() and name.isdigit() else name) for name in names)
    if any(device.kind != "cuda" for device in found):
        raise no_gpus
    twice = next((device for device in found if found.count(device) > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"--gpus {text} names {twice.label} more than once", "name each GPU once")
    if len(found) > 1 and any(device.uuid.startswith("MIG-") for device in found):
        raise InvalidRequestError(f"--gpus {text}: MIG instances cannot train together", "name one of them")
    return found


def _is_named(wanted: str, device: Device) -> bool:
    """Return whether a name such as ``cuda:1`` or the beginning of a UUID means this device."""
    if wanted.startswith(("GPU-", "MIG-")):
        return device.uuid.startswith(wanted)
    kind, _, number = wanted.partition(":")
    return device.kind == kind and (kind == "cpu" or device.index == int(number or 0))


def _with_reasons(hint: str) -> str:
    """Add to a hint why a GPU may be missing: ``CUDA_VISIBLE_DEVICES`` hides it, or NVML cannot read it."""
    if VISIBLE in os.environ:
        hint += f", or change {VISIBLE}={os.environ[VISIBLE]!r}, which hides the other GPUs"
    problem = nvml_problem()
    return f"{hint}; {problem}" if problem else hint


@functools.cache
def devices_type() -> type[Any]:
    """Return the type of the JSON document of ``autotune devices``, from which its schema is made."""
    device = make_record("Device", [("label", str), *record_fields(Device), ("precisions", tuple[Precision, ...])])
    return make_record(
        "Devices",
        [
            ("devices", tuple[device, ...]),  # type: ignore[valid-type]
            ("nvml_problem", str | None),
            ("packages", dict[str, str | None]),
        ],
    )


def devices_document(devices: Iterable[Device], problem: str | None, packages: Mapping[str, str | None]) -> Any:
    """Return the JSON document of ``autotune devices``: devices, NVML's problem, versions of optional packages."""
    found = [device.document() for device in devices]
    return encode(decode({"devices": found, "nvml_problem": problem, "packages": dict(packages)}, devices_type()))
