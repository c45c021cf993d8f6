"""Make a folder of its own for each process that runs a job, so that nothing of the job is left when it is removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass

from autotune.core.errors import AutotuneError

# A Unix socket's path has at most 103 bytes on macOS, 107 on Linux (sun_path in sys/un.h, less the final zero). The
# longest that is made in a temporary folder is that of torch's shared memory manager, for loader processes.
_MOST_PATH_BYTES = 103 - len("/torch-shm-dir-XXXXXX/manager.sock")
_SHORT_FOLDER = "/tmp"


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder with two in it: what a job writes on purpose, and what it makes in ``TMPDIR``."""

    path: str

    @property
    def output_dir(self) -> str:
        """For the ``output_dir`` of ``TrainingArguments``; scripts want it to be empty."""
        return os.path.join(self.path, "out")

    @property
    def temporary(self) -> str:
        """For ``TMPDIR``: sockets of loader processes, compiled kernels and the like."""
        return os.path.join(self.path, "tmp")

    def enter(self) -> None:
        """Have this process, and those that it starts, make their temporary files here."""
        os.environ["TMPDIR"] = self.temporary
        # Python remembers the folder that it found first, here in the process that this one was forked from.
        tempfile.tempdir = None

    def remove(self) -> None:
        """Remove everything; nobody may be writing to it any more."""
        shutil.rmtree(self.path, ignore_errors=True)


def make_scratch(prefix: str) -> Scratch:
    """Make a folder beneath ``TMPDIR``, or beneath ``/tmp`` where sockets would get too long a path.

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
        # The folder that Python remembers may be gone by now: it looks for another one.
        tempfile.tempdir = None
        path = tempfile.mkdtemp(prefix=prefix)
    scratch = Scratch(path)
    os.mkdir(scratch.output_dir)
    os.mkdir(scratch.temporary)
    return scratch
