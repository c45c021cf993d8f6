"""Publish folders of prepared datasets, and lock those in use so that no other search removes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.core.dataset_spec import DataFacts, facts_in


@dataclass(frozen=True)
class HeldData:
    """A folder of a prepared dataset with a shared lock: nobody removes it until it is released."""

    folder: Path
    facts: DataFacts
    fd: int
    """File descriptor of the folder, which holds the shared lock."""

    def release(self) -> None:
        """Release the lock, so that others may remove the folder."""
        os.close(self.fd)

    def discard(self) -> None:
        """Remove the folder, unless another search holds it as well. ``release`` must still be called."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        with _only_change_in(self.folder.parent), contextlib.suppress(OSError):
            if _is_folder(self.folder, self.fd):
                # Renamed first, so that nobody finds a half removed folder.
                shutil.rmtree(self.folder.rename(_name_before_removal(self.folder)), ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()


def hold_data(folder: Path) -> HeldData | None:
    """Lock the folder of a prepared dataset. Return ``None`` where the folder is missing or incomplete."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        # Some network file systems do not support locks.
        fcntl.flock(fd, fcntl.LOCK_SH)
    facts = facts_in(folder)
    # The folder may have been removed or replaced while this process waited for the lock.
    if facts is None or not _is_folder(folder, fd):
        os.close(fd)
        return None
    return HeldData(folder, facts, fd)


def publish_data(partial: Path, folder: Path) -> DataFacts | None:
    """Move a prepared dataset to its final folder. If another search was first, return the facts of its folder."""
    with _only_change_in(folder.parent):
        facts = facts_in(folder)
        if facts is not None:
            return facts
        if os.path.lexists(folder):
            # A folder without facts is incomplete, and no search uses it.
            shutil.rmtree(folder.rename(_name_before_removal(folder)), ignore_errors=True)
        try:
            partial.rename(folder)
        except OSError:
            # Without locks, another search may have published its folder in between.
            facts = facts_in(folder)
            if facts is None:
                raise
    return facts


@contextlib.contextmanager
def _only_change_in(parent: Path) -> Iterator[None]:
    """Lock a folder's parent, so that only this process adds or removes entries."""
    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _name_before_removal(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.removed-{os.getpid()}")


def _is_folder(folder: Path, fd: int) -> bool:
    """Return whether the path still names the folder that was opened."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(fd))
    except OSError:
        return False
