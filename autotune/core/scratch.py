"""Make a temporary folder for each process that runs a job, so that removing it removes all that the job left."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.errors import AutotuneError

# A Unix socket's path has at most 103 bytes on macOS, 107 on Linux (sun_path in sys/un.h, less the final zero). The
# longest that is made in a temporary folder is the socket of torch's shared memory manager, for data loader workers.
_MOST_PATH_BYTES = 103 - len("/torch-shm-dir-XXXXXX/manager.sock")
_SHORT_FOLDER = "/tmp"


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder with two subfolders: the job's ``output_dir``, and its ``TMPDIR``."""

    path: str

    @property
    def output_dir(self) -> str:
        """The ``output_dir`` of ``TrainingArguments``; training scripts want it to be empty."""
        return os.path.join(self.path, "out")

    @property
    def stop_file(self) -> str:
        """Where a process that the job started says why it ended the job; not there otherwise."""
        return os.path.join(self.path, "stopped.json")

    @property
    def cache_list(self) -> str:
        """Where a trial lists the cache files that it makes elsewhere; not there where it makes none."""
        return os.path.join(self.path, "cache_files")

    @property
    def made_list(self) -> str:
        """Where a job lists the files and folders that it makes elsewhere; a folder's path ends with a slash."""
        return os.path.join(self.path, "made")

    @property
    def temporary(self) -> str:
        """The ``TMPDIR`` of the job: sockets of data loader workers, compiled kernels and the like."""
        return os.path.join(self.path, "tmp")

    def enter(self) -> None:
        """Make this process and those that it starts create their temporary files here."""
        os.environ["TMPDIR"] = self.temporary
        # Python caches the folder that it found first, here in the process that this one was forked from.
        tempfile.tempdir = None

    def remove(self) -> None:
        """Remove the folder and the files listed in it. No process may be writing to it any more."""
        for listed in (self.cache_list, self.made_list):
            with contextlib.suppress(OSError), open(listed, encoding="utf-8") as lines:
                remove_made(lines.read().splitlines())
        shutil.rmtree(self.path, ignore_errors=True)

    def take_made(self) -> tuple[str, ...]:
        """Return what the job made elsewhere, which ``remove`` then leaves there."""
        try:
            with open(self.made_list, encoding="utf-8") as lines:
                made = tuple(lines.read().splitlines())
            os.unlink(self.made_list)
        except OSError:
            return ()
        return made


def remove_made(paths: Sequence[str]) -> None:
    """Remove files, and folders that are empty then; a folder's path ends with a slash."""
    for path in reversed(paths):
        with contextlib.suppress(OSError):
            os.rmdir(path) if path.endswith(os.sep) else os.unlink(path)


def make_scratch(prefix: str) -> Scratch:
    """Make a folder in ``TMPDIR``, or in ``/tmp`` where the path of a socket in it would be too long.

    Raises ``AutotuneError`` where no temporary folder can be made.
    """
    try:
        scratch = _make(prefix)
        if len(os.fsencode(scratch.temporary)) > _MOST_PATH_BYTES:
            with contextlib.suppress(OSError):
                shorter = _make(prefix, _SHORT_FOLDER)
                scratch.remove()
                return shorter
        return scratch
    except OSError as error:
        where = f" in {os.path.dirname(error.filename)}" if error.filename else ""
        raise AutotuneError(
            f"no temporary folder can be made{where}: {error.strerror}", "set TMPDIR to a folder that can be written"
        ) from error


def _make(prefix: str, folder: str | None = None) -> Scratch:
    try:
        path = tempfile.mkdtemp(prefix=prefix, dir=folder)
    except OSError:
        if folder is not None:
            raise
        # The cached folder may have been removed since: look for another one.
        tempfile.tempdir = None
        path = tempfile.mkdtemp(prefix=prefix)
    scratch = Scratch(path)
    os.mkdir(scratch.output_dir)
    os.mkdir(scratch.temporary)
    return scratch
