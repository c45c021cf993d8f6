"""Identify a process by host, user and start, so that others can tell who it is and whether it still runs."""

from __future__ import annotations

import contextlib
import getpass
import os
from dataclasses import dataclass
from pathlib import Path

from autotune.core.placement import this_host

_STAT = "/proc/{pid}/stat"
# Fields of that file after the name in parentheses, from "state" on: "starttime" is field 22 of all (man 5 proc).
_START_FIELD = 19


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of a user on a host."""

    user: str
    host: str
    machine: str
    """The same for two processes exactly where their process ids can be compared: one boot, one namespace of ids."""
    pid: int
    started: str
    """When the process started, as the kernel counts; tells it from a later one of the same id."""

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
        # /proc may hide the processes of other users.
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
    """Return an identifier of this boot of the host and of this PID namespace."""
    boot, namespace = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{this_host()} {boot} {namespace}"[:250]


def user_name() -> str:
    """Return the name of the user that runs this process, or the number where there is no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(os.getuid())


def _started(pid: int) -> str | None:
    """Return when a process of this machine started; ``None`` for an unknown process or a zombie."""
    try:
        _, _, rest = Path(_STAT.format(pid=pid)).read_text(encoding="utf-8", errors="replace").rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    return "" if fields[0] in ("Z", "X") else fields[_START_FIELD]
