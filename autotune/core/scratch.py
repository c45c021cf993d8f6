"""Make temporary folders for jobs, files that only their user can read, and the folder of compiled kernels."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass

from autotune.core.errors import AutotuneError


def private_opener(path: str, flags: int) -> int:
    """Open a file with mode 0600, for ``open(opener=…)``."""
    return os.open(path, flags, 0o600)


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the folder of kernels for torch.compile (torch/_inductor/runtime), Triton's included."""


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Make torch keep compiled kernels in the user's cache folder, unless the environment names another folder.

    Its entries are keyed by the versions of torch and Triton, by the GPU and by the code, so that one folder serves
    all. A model that took 64 to 79 s to compile took 9 s with it (Qwen2.5-0.5B, H200, torch 2.11.0).
    """
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(cache, "autotune", "compiled")
    if CACHE_VARIABLE in environment:
        return
    # Where the home folder cannot be written, torch uses one of the temporary folder.
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.access(folder, os.W_OK):
            environment[CACHE_VARIABLE] = folder


# A Unix socket's path has at most 103 bytes on macOS, 107 on Linux (sun_path in sys/un.h, less the final zero). The
# longest that is made in a temporary folder is the socket of torch's shared memory manager, for data loader workers.
_MOST_PATH_BYTES = 103 - len("/torch-shm-dir-XXXXXX/manager.sock")
_SHORT_FOLDER = "/tmp"


@dataclass(frozen=True, slots=True)
class Scratch:
    """The temporary folder of a job, with subfolders for ``output_dir`` and ``TMPDIR``, and files for messages."""

    path: str

    @property
    def output_dir(self) -> str:
        """The ``output_dir`` of ``TrainingArguments``; training scripts want it to be empty."""
        return os.path.join(self.path, "out")

    @property
    def stop_file(self) -> str:
        """The file in which a process of the job writes why it ended the job."""
        return os.path.join(self.path, "stopped.json")

    @property
    def cache_list(self) -> str:
        """The file in which a trial lists cache files that it makes elsewhere."""
        return os.path.join(self.path, "cache_files")

    @property
    def layers(self) -> str:
        """The folder for what the user's own code writes over the user's files, in a layer of overlayfs."""
        return os.path.join(self.path, "layers")

    @property
    def kept_file(self) -> str:
        """The file in which an inspection names its folder of layers, which trials are to see beneath their own."""
        return os.path.join(self.path, "kept")

    @property
    def temporary(self) -> str:
        """The ``TMPDIR`` of the job: sockets of data loader workers, compiled kernels and the like."""
        return os.path.join(self.path, "tmp")

    def enter(self) -> None:
        """Make this process and those that it starts create their temporary files here."""
        os.environ["TMPDIR"] = self.temporary
        # Python caches the folder that it found first: a forked process would use that of its parent.
        tempfile.tempdir = None

    def remove(self) -> None:
        """Remove the folder and the files in ``cache_list``. No process may be writing to it any more."""
        with contextlib.suppress(OSError), open(self.cache_list, encoding="utf-8") as listed:
            for path in listed.read().splitlines():
                with contextlib.suppress(OSError):
                    os.unlink(path)
        shutil.rmtree(self.path, ignore_errors=True)
        if os.path.lexists(self.path):
            # Some folders, such as an overlay's work folder, have a mode that keeps even their owner out.
            for folder, names, _ in os.walk(self.path):
                for path in (os.path.join(folder, name) for name in names):
                    with contextlib.suppress(OSError):
                        if not os.path.islink(path):
                            os.chmod(path, 0o700)
            shutil.rmtree(self.path, ignore_errors=True)


def make_scratch(prefix: str) -> Scratch:
    """Make a job's scratch folder in ``TMPDIR``, or in ``/tmp`` where the path of a socket in it would be too long.

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
    """Make a scratch folder with its subfolders in ``folder``; ``None`` means the temporary folder."""
    try:
        path = tempfile.mkdtemp(prefix=prefix, dir=folder)
    except OSError:
        if folder is not None:
            raise
        # The folder that Python has cached may have been removed: have it look for another one.
        tempfile.tempdir = None
        path = tempfile.mkdtemp(prefix=prefix)
    scratch = Scratch(path)
    os.mkdir(scratch.output_dir)
    os.mkdir(scratch.temporary)
    return scratch
