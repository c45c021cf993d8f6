"""Lock a device for one search at a time, with a file that says who holds the lock.

The kernel releases the lock when the process that holds it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from autotune.core.placement import user_name

FOLDER_VARIABLE = "AUTOTUNE_LOCKS"
"""The environment variable that names another folder for the lock files."""
# One folder for all users of the machine, whatever TMPDIR says: a batch system gives each job its own TMPDIR.
_FOLDER = "/tmp/autotune-locks"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, as far as the lock file tells."""

    pid: int | None = None
    user: str | None = None
    study: str | None = None
    since: str | None = None
    """ISO 8601, UTC."""

    def describe(self) -> str:
        """Return the holder in words: ``process 71 of ada (study bert-64, since 2026-11-21 10:00 UTC)``."""
        who = f"process {self.pid}" if self.pid else "another process"
        who += f" of {self.user}" if self.user else ""
        facts = [f"study {self.study}"] if self.study else []
        facts += [f"since {self.since[:16].replace('T', ' ')} UTC"] if self.since else []
        return f"{who} ({', '.join(facts)})" if facts else who


class LockError(Exception):
    """No lock file can be made in the folder for locks, or its file system has no locks."""

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(f"no lock can be kept in {folder}: {error.strerror or error}")


class Lock:
    """A lock by name among the processes of this machine; the kernel releases it when this process ends.

    Why not ``filelock``: it has no shared locks of the kernel, which ``Presence`` needs on the same files, and it
    follows a symbolic link in place of the folder. Only calling ``flock`` would be left to it, for 33 ms of imports.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        # A readable file name, and a hash to keep similar names apart.
        plain = re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:80]
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:12]
        self.path = (folder or Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER)) / f"{plain}-{digest}.lock"
        self._fd: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, study: str) -> Holder | None:
        """Take the lock and return ``None``; where another process has it, return that holder without waiting.

        ``study`` is recorded for others to see. Raises ``LockError`` where no lock can be kept.
        """
        try:
            fd = _open(self.path)
        except OSError as error:
            raise LockError(self.path.parent, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(fd)
            os.close(fd)
            return holder
        except OSError as error:
            # Some network file systems do not support locks.
            os.close(fd)
            raise LockError(self.path.parent, error) from error
        self._fd = fd
        document = {"pid": os.getpid(), "user": user_name(), "study": study, "since": datetime.now(UTC).isoformat()}
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(document).encode(), 0)
        return None

    def release(self) -> None:
        """Release the lock. The file stays: if it were removed, two others could hold the lock at once."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None


def _open(path: Path) -> int:
    """Open or create a lock file, which every user may lock; return its descriptor."""
    folder = _open_folder(path.parent)
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(FileNotFoundError):
            # Without O_CREAT first: the kernel may refuse to "create" a file of another user in such a folder.
            return os.open(path.name, flags, dir_fd=folder)
        fd = os.open(path.name, flags | os.O_CREAT, 0o666, dir_fd=folder)
        with contextlib.suppress(OSError):
            # The process's umask took rights away when the file was created.
            os.fchmod(fd, 0o666)
        return fd
    finally:
        os.close(folder)


def _open_folder(folder: Path) -> int:
    """Open or create the folder of the locks, in which users cannot remove each other's files; return its descriptor.

    Raises ``PermissionError`` for a symbolic link of another user. In a folder that everybody may write to, such a link
    could have files created anywhere.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    is_made = False
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
        is_made = True
        status = os.lstat(folder)
    if not stat.S_ISLNK(status.st_mode):
        flags |= os.O_NOFOLLOW
    elif status.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "it is a link that another user made", str(folder))
    fd = os.open(folder, flags)
    if is_made:
        with contextlib.suppress(OSError):
            # As /tmp: everybody may write, and the sticky bit keeps each user's files from the others.
            os.fchmod(fd, 0o1777)
    return fd


def _holder(fd: int) -> Holder:
    """Return the holder recorded in the lock file; an empty holder while the file is being written."""
    try:
        document: Any = json.loads(os.pread(fd, 4096, 0))
        pid, *words = (document[name] for name in ("pid", "user", "study", "since"))
        return Holder(int(pid), *(str(word)[:120] for word in words))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder()


# struct flock of fcntl(2): type, whence, start, length, process id, with the padding that C gives it.
_FLOCK = "hhqqi0q"


def _whole_file(kind: int) -> bytes:
    """Return the ``struct flock`` of a lock of this kind on a whole file; locks of open files need process id 0."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a search knew about other searches on its device at one moment; see ``had_company``."""

    is_alone: bool
    arrivals: int | None
    """How many searches have come to the device so far; ``None`` where that is not known."""


class Presence:
    """A search's presence on a device, from entering to leaving the block.

    All searches on a device hold a shared lock on one file, and each appends a byte to it when it comes. ``mark`` asks
    whether an exclusive lock would be possible, and takes none: two searches may ask at once. The kernel releases the
    lock when a process ends, however that happens. Where no lock file can be kept, other searches go unnoticed.
    """

    def __init__(self, name: str) -> None:
        self._path = Lock(f"searches on {name}").path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            self._fd = _open(self._path)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _whole_file(fcntl.F_RDLCK))
            # In append mode, two searches that come at once do not overwrite each other's byte.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_APPEND)
            os.write(self._fd, b"\n")
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def mark(self) -> Mark:
        """Return a mark of the current searches. Two marks tell whether another search ran between them."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                # The kernel answers with a lock that conflicts with an exclusive one: another search's, or F_UNLCK.
                conflicting = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
                is_alone = struct.unpack(_FLOCK, conflicting)[0] == fcntl.F_UNLCK
                return Mark(is_alone, os.fstat(self._fd).st_size)
        return Mark(is_alone=True, arrivals=None)


def had_company(before: Mark, after: Mark) -> bool:
    """Return whether another search used the device at any time between two marks."""
    return not (before.is_alone and after.is_alone and before.arrivals == after.arrivals)
