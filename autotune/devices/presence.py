"""Detect other searches on a shared device while this process measures on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from autotune.devices.lock import open_lock_file

# struct flock of fcntl(2): type, whence, start, length, process id, with the padding that C gives it.
_FLOCK = "hhqqi0q"


def _whole_file(kind: int) -> bytes:
    """Return a lock of this kind on a whole file, however it grows; its process id has to be 0."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Mark:
    """What was known about other searches at one moment."""

    is_alone: bool
    arrivals: int | None
    """How many searches have come to the device so far; ``None`` where that is not known."""


class Presence:
    """A search's presence on a device, from entering to leaving the block.

    All searches on a device hold a shared lock on one file, and each appends a byte to it when it comes. Looking asks
    whether an exclusive lock would be possible, and takes none: two searches may look at once. The kernel releases the
    lock when a process ends, however that happens. Where no lock file can be kept, other searches go unnoticed.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._name = f"searches on {name}"
        self._folder = folder
        self._fd: int | None = None

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            self._fd = open_lock_file(self._name, self._folder)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _whole_file(fcntl.F_RDLCK))
            # In append mode, two searches that come at once do not overwrite each other's byte.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_APPEND)
            os.write(self._fd, b"\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def mark(self) -> Mark:
        """Return who is there now. Two marks tell whether any other search was there between them."""
        if self._fd is None:
            return Mark(is_alone=True, arrivals=None)
        try:
            return Mark(self._is_alone(self._fd), os.fstat(self._fd).st_size)
        except OSError:
            return Mark(is_alone=True, arrivals=None)

    @staticmethod
    def _is_alone(fd: int) -> bool:
        """Return whether no other search holds its lock."""
        in_the_way = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
        kind: int = struct.unpack(_FLOCK, in_the_way)[0]
        return kind == fcntl.F_UNLCK


def had_company(before: Mark, after: Mark) -> bool:
    """Return whether another search was on the device at any time between two marks."""
    return not (before.is_alone and after.is_alone and before.arrivals == after.arrivals)
