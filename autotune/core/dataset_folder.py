"""Publish and hold the folders that data was read into, which searches share, so that none loses what it uses."""

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
    """A folder of data that nobody removes until it is released."""

    folder: Path
    facts: DataFacts
    fd: int
    """Of the folder, with a shared lock on it."""

    def release(self) -> None:
        """Let others remove the folder."""
        os.close(self.fd)

    def discard(self) -> None:
        """Remove the folder, unless another search holds it, too; it is still to be released."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        with _only_change_in(self.folder.parent), contextlib.suppress(OSError):
            if _is_folder(self.folder, self.fd):
                # Gone from its place at once: what is half removed must be found by nobody.
                shutil.rmtree(self.folder.rename(_aside(self.folder)), ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()


def hold_data(folder: Path) -> HeldData | None:
    """Hold a folder of data that was read; ``None`` where there is none, or none that is complete."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        # Some network file systems have no locks.
        fcntl.flock(fd, fcntl.LOCK_SH)
    facts = facts_in(folder)
    # While this waited for the lock the folder may have been removed, or another one published.
    if facts is None or not _is_folder(folder, fd):
        os.close(fd)
        return None
    return HeldData(folder, facts, fd)


def publish_data(partial: Path, folder: Path) -> DataFacts | None:
    """Move what was read to its place; where another search was quicker leave that, and return its facts."""
    with _only_change_in(folder.parent):
        known = facts_in(folder)
        if known is not None:
            return known
        if os.path.lexists(folder):
            # Without facts no search uses it.
            shutil.rmtree(folder.rename(_aside(folder)), ignore_errors=True)
        try:
            partial.rename(folder)
        except OSError:
            # Where there are no locks, another search may have come between.
            known = facts_in(folder)
            if known is None:
                raise
    return known


@contextlib.contextmanager
def _only_change_in(parent: Path) -> Iterator[None]:
    """Change entries of a folder while no other process does."""
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


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.removed-{os.getpid()}")


def _is_folder(folder: Path, fd: int) -> bool:
    """Whether the path still names the folder that was opened."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(fd))
    except OSError:
        return False
