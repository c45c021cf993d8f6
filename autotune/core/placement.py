"""Describe where a trial runs: the host, and one device for each rank."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import PurePath

from autotune.core.device import Device, DeviceKind
from autotune.core.errors import DeviceError


@functools.cache
def this_host() -> str:
    """Return the name of this host, as ``uname -n`` prints it."""
    return platform.node() or "localhost"


def rank_log(log_path: str, rank: int) -> str:
    """Return the log file of a rank: for rank 0 the trial's own, for rank 1 ``trial-0003.rank1.log``."""
    path = PurePath(log_path)
    return log_path if rank == 0 else str(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The devices of a job's processes, one for each rank, as these processes are told them."""

    kind: DeviceKind
    uuids: tuple[str, ...]
    """In the order of the ranks. On a CPU all are the same."""

    @property
    def ranks(self) -> int:
        """The number of processes that work together."""
        return len(self.uuids)


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a trial, one for each rank, in the order of the ranks.

    One GPU is a placement of one rank. On a CPU several ranks share the one device there is.
    """

    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a placement has one device at least")
        gpus = [device for device in self.devices if device.kind == "cuda"]
        if gpus and len({gpu.uuid for gpu in gpus}) < len(self.devices):
            raise DeviceError(
                f"{', '.join(self.labels)} are not {self.ranks} GPUs", "name as many different GPUs as there are ranks"
            )
        names = list(dict.fromkeys(device.name for device in self.devices))
        if len(names) > 1:
            raise DeviceError(f"{' and '.join(names)} are not equal", "choose GPUs of one kind")

    @classmethod
    def of(cls, *devices: Device) -> Placement:
        """Return the placement on these devices of this host."""
        return cls(devices)

    @property
    def ranks(self) -> int:
        """The number of processes that train together."""
        return len(self.devices)

    @property
    def device(self) -> Device:
        """The device of rank 0. Name and capability are the same for all ranks."""
        return self.devices[0]

    @property
    def kind(self) -> DeviceKind:
        """Whether the ranks run on GPUs or on the CPU."""
        return self.device.kind

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of the devices, without duplicates."""
        return tuple(dict.fromkeys(device.uuid for device in self.devices))

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the devices, without duplicates: ``cuda:0``, ``cuda:1``."""
        return tuple(dict.fromkeys(device.label for device in self.devices))

    @property
    def label(self) -> str:
        """``cuda:0``, or ``cuda:0, cuda:1`` for two ranks."""
        return ", ".join(self.labels)

    @property
    def name(self) -> str:
        """The product name of the devices."""
        return self.device.name

    @property
    def least_free_bytes(self) -> int:
        """Free memory of the device with the least; its total memory where free memory is unknown."""
        return min(
            device.memory_total_bytes if device.memory_free_bytes is None else device.memory_free_bytes
            for device in self.devices
        )

    @property
    def rank_devices(self) -> RankDevices:
        """The part of the placement that trial processes need."""
        return RankDevices(self.kind, tuple(device.uuid for device in self.devices))
