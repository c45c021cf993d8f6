"""Describe where a trial runs, the host and one device for each rank, and identify the process that runs it."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import platform
from dataclasses import dataclass
from pathlib import Path, PurePath

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
    """The devices of a job, one for each rank: the part of a ``Placement`` that is sent to the job's processes."""

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

    They are equal GPUs, each a different one, or all the CPU. Raises ``DeviceError`` for others.
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


_STAT = "/proc/{pid}/stat"
# Fields of that file after the name in parentheses, from "state" on: "starttime" is field 22 of all (man 5 proc).
_START_FIELD = 19


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds a lease, with what tells whether it still runs."""

    user: str
    host: str
    machine: str
    """Of ``this_machine``: equal for two processes exactly where their process ids can be compared."""
    pid: int
    started: str
    """When the process started, as the kernel counts, to tell it from a later process with the same id."""

    def describe(self) -> str:
        """Return ``process 71 of ada``, with the host's name where it is another host."""
        words = f"process {self.pid} of {self.user}"
        return words if self.host == this_host() else f"{words} on {self.host}"

    def is_gone(self) -> bool:
        """Return whether the process is known to have ended, which only its own machine can tell."""
        if self.machine != this_machine():
            return False
        started = _started(self.pid)
        if started is not None:
            return started != self.started
        # /proc may hide the processes of other users. Signal 0 only asks whether there is such a process.
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


def this_owner() -> Owner:
    """Return this process as an owner."""
    pid = os.getpid()
    return Owner(user_name(), this_host(), this_machine(), pid, _started(pid) or "")


def this_machine() -> str:
    """Return an identifier of this boot of the host and of this namespace of process ids (a container has its own)."""
    boot, namespace = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{this_host()} {boot} {namespace}"[:250]


def user_name() -> str:
    """Return the name of the user that runs this process, or the user's number where the system knows no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(os.getuid())


def _started(pid: int) -> str | None:
    """Return when a process of this machine started; ``None`` for an unknown process, an empty text for a zombie."""
    try:
        _, _, rest = Path(_STAT.format(pid=pid)).read_text(encoding="utf-8", errors="replace").rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    return "" if fields[0] in ("Z", "X") else fields[_START_FIELD]
