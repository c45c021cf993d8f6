"""Keep the user's own code from touching their files, whatever it and the processes that it starts do.

What stays open to it on purpose: the job's temporary folder, devices, shared memory, and the caches of compilers and of
the Hugging Face hub, which would never be warm otherwise.

``python -m autotune.worker.user.protection`` prints, in lines of JSON, how files can be protected on this machine; the
last line is the best way. It is run once by a process that searches.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from autotune.core.code_interface import FoundProtection, Protection, ProtectionKind
from autotune.core.schema import encode
from autotune.core.scratch import Scratch, keep_compiled, make_scratch
from autotune.core.units import format_bytes
from autotune.worker.failures import chain_of
from autotune.worker.process import ForkedRun
from autotune.worker.user import sandbox

if TYPE_CHECKING:
    from autotune.worker.rendezvous import Ranks

# No limit by itself: who runs this waits for less.
_MOST_SECONDS = 60.0
# Share of the available memory that layers in memory may take. A choice.
_SHARE_OF_MEMORY = 0.5

_CACHES = {
    "HF_HOME": "~/.cache/huggingface",
    "TORCH_HOME": "~/.cache/torch",
    "TORCH_EXTENSIONS_DIR": "~/.cache/torch_extensions",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "CUDA_CACHE_PATH": "~/.nv/ComputeCache",
}
"""Variables that name the folder of a cache, and where it is by default."""
_NAMED_CACHES = (
    "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "TRANSFORMERS_CACHE",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
# CUDA's Multi-Process Service, through which a GPU may be reached.
_PIPES = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps", "CUDA_MPS_LOG_DIRECTORY": "/var/log/nvidia-mps"}

WRITABLE_VARIABLE = "AUTOTUNE_WRITABLE"
"""Set where Landlock is at work: the folders that may be written to, for a Python that the user's code starts."""


class Protected:
    """How the user's files are protected from the runs of their code in a job.

    A job makes it while it has a single thread. Each of its runs is begun in a process of its own, or in the job's.
    In a mount namespace a run's files are covered by layers that take what it writes. Landlock refuses writes instead.
    """

    def __init__(self, protection: Protection, scratch: Scratch, cwd: str, rank: int = 0) -> None:
        self.kind: ProtectionKind = protection.kind
        self._scratch = scratch
        self._cwd = cwd
        self._layer = protection.layer
        self._outside = [scratch.path, *caches(cwd)]
        self._cover: sandbox.Cover | None = None
        self._has_user_namespace = False
        self._is_covered = False
        self._made_by_pid = os.getpid()
        self._has_mount_namespace = self.kind in ("overlay", "read-only")
        # Other ranks join the namespace of rank 0.
        if self._has_mount_namespace and rank == 0:
            self._has_user_namespace = sandbox.open_namespace()
        elif self.kind == "landlock":
            if sandbox.is_within(os.path.realpath(cwd), sandbox.SHARED_MEMORY):
                raise OSError(errno.EACCES, f"Landlock does not protect files in {sandbox.SHARED_MEMORY}")
            os.environ[WRITABLE_VARIABLE] = os.pathsep.join(self.writable)
            sandbox.restrict_writes(self.writable)
            sandbox.refuse_attributes(self.writable)

    @property
    def writable(self) -> list[str]:
        """The folders to which Landlock allows writes."""
        return [*self._outside, sandbox.SHARED_MEMORY]

    def begin(self) -> None:
        """Lay layers over the user's files for a run of their code, unless this is done, or Landlock is used."""
        if self._is_covered or not self._has_mount_namespace:
            return
        self._is_covered = True
        if os.getpid() != self._made_by_pid:
            # Each run of a job has mounts of its own.
            sandbox.copy_namespace()
        # The files that the runs of earlier jobs have written.
        below = self._layer if self._layer is not None and os.path.isdir(self._layer) else None
        works_in = [os.path.realpath(path) for path in (self._cwd, Path.home()) if os.path.isdir(path)]
        self._cover = sandbox.Cover(self._scratch.layers, self._outside, works_in, self._has_user_namespace, below)
        self._cover.lay(int(_SHARE_OF_MEMORY * psutil.virtual_memory().available))
        if self._has_user_namespace:
            sandbox.drop_capabilities()

    def join(self, pid: int) -> None:
        """Join another process's protection, so that ranks see each other's files. Does nothing with Landlock."""
        if self._has_mount_namespace:
            self._is_covered = True
            cwd = os.getcwd()
            self._has_user_namespace = sandbox.join_namespace(pid)
            # Joining moved this process to the root of the other's mounts.
            os.chdir(cwd)
            if self._has_user_namespace:
                sandbox.drop_capabilities()

    def covers(self, path: str) -> bool:
        """Return whether writes to a path go to the layers of this process, not to the user's files."""
        return self._cover is not None and self._cover.covers(path)

    def why_refused(self, error: OSError) -> str | None:
        """Return why the protection made a write fail with ``error``; ``None`` where it did not."""
        if error.errno == errno.EROFS:
            return _READ_ONLY if self.kind == "read-only" else "nothing can be laid over its folder here"
        if self._has_user_namespace and error.errno == errno.EOVERFLOW:
            return "it is of another user or group, so that only root can lay something over it"
        if error.errno == errno.ENOSPC and self._cover is not None and self._cover.in_memory:
            return "what trials write is kept in memory here, and there was not enough"
        if self.kind != "landlock" or error.errno not in (errno.EACCES, errno.EPERM, errno.EXDEV):
            return None
        path = os.path.realpath(os.fsdecode(error.filename)) if error.filename else "/"
        # access(2) does not ask Landlock: a failed write that access(2) allows was refused by Landlock.
        existing = path if os.path.lexists(path) else os.path.dirname(path)
        is_writable = any(sandbox.is_within(path, folder) for folder in self.writable)
        return _READ_ONLY if not is_writable and os.access(existing, os.W_OK) else None

    def keep(self) -> None:
        """Have ``take_kept`` keep the files that this run has written. Layers in memory are lost."""
        if self._cover is not None and not self._cover.in_memory:
            Path(self._scratch.kept_file).write_text(self._cover.run, encoding="utf-8")


_current: Protected | None = None
"""The protection of this process, which cannot leave its name spaces; ``None`` without one."""


def protect(protection: Protection, scratch: Scratch, cwd: str, ranks: Ranks, *, shares: bool) -> None:
    """Protect the user's files from now on, before this process starts another thread.

    With ``shares``, all runs of all ranks of the job see the files that one of them writes. Otherwise each process that
    runs the code has a layer of its own for them. Raises ``OSError`` where the kernel refuses.
    """
    global _current
    keep_compiled(os.environ)
    _current = Protected(protection, scratch, cwd, ranks.rank)
    if shares:
        if ranks.rank == 0:
            _current.begin()
        leader = ranks.gather(os.getpid())[0]
        if ranks.rank > 0:
            _current.join(leader)


def begin_run() -> None:
    """Cover the user's files, as ``protect`` has set it up, before this process runs their code."""
    if _current is not None:
        _current.begin()


def keep_run() -> None:
    """Keep the files that this run has written, for the trials."""
    if _current is not None:
        _current.keep()


class Room:
    """The limit on what a job may write to its folder: half of what was free on the disk when this was made."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._most_bytes = shutil.disk_usage(folder).free // 2
        self._next_look_at = 0.0

    def why_exceeded(self) -> str | None:
        """Return why the job must end, if it wrote too much; ``None`` otherwise. Checks the disk only now and then."""
        began_at = time.monotonic()
        if began_at < self._next_look_at:
            return None
        written_bytes = 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with contextlib.suppress(OSError):
                    written_bytes += os.lstat(os.path.join(folder, name)).st_blocks * 512
        # Counting many files must not disturb what is measured: it takes at most a fiftieth of the time.
        self._next_look_at = time.monotonic() + max(1.0, 50 * (time.monotonic() - began_at))
        if written_bytes <= self._most_bytes:
            return None
        return (
            f"its code wrote {format_bytes(written_bytes)}, more than half of what was free in "
            f"{os.path.dirname(self._folder)}"
        )


def take_kept(scratch: Scratch, layer: str) -> None:
    """Move the files that a finished job has kept, if any, to ``layer``, which lies below later jobs' layers."""
    try:
        run_folder = Path(scratch.kept_file).read_text(encoding="utf-8")
        names = os.listdir(run_folder)
    except OSError:
        return
    # One name for each covered folder; overlayfs has put the written files into its "upper".
    for name in names:
        upper = os.path.join(run_folder, name, "upper")
        with contextlib.suppress(OSError):
            # To be moved, a folder must be writable itself.
            os.chmod(upper, 0o700)
            if os.listdir(upper):
                os.rename(upper, os.path.join(layer, name))


def caches(cwd: str) -> list[str]:
    """Return the folders that stay unprotected since they hold caches (compilers, the hub, torch) or CUDA's pipes.

    A folder that contains the working folder ``cwd`` or the user's home is left out. The hub's folder and, with a GPU,
    those of torch and compilers are created if missing: otherwise their files would be discarded with the layer.
    """
    uses_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    may_create = {}
    for variable, default in _CACHES.items():
        folder = os.environ.get(variable) or default.replace("~/.cache", cache_home)
        may_create[folder] = variable == "HF_HOME" or uses_gpu
    may_create |= dict.fromkeys((os.environ.get(variable) or default for variable, default in _PIPES.items()), False)
    may_create |= dict.fromkeys(filter(None, map(os.environ.get, _NAMED_CACHES)), False)
    users_folders = [os.path.realpath(path) for path in (cwd, Path.home())]
    found = []
    for folder, creates in may_create.items():
        path = os.path.realpath(os.path.expanduser(folder))
        with contextlib.suppress(OSError):
            if creates:
                os.makedirs(path, exist_ok=True)
        if os.path.isdir(path) and not any(sandbox.is_within(users, path) for users in users_folders):
            found.append(path)
    return found


def refused_write(error: BaseException) -> tuple[str, str] | None:
    """Return file and reason where the protection refused a write, which led to ``error``; ``None`` where not."""
    if _current is None or _current.kind == "none":
        return None
    for seen in chain_of(error):
        if isinstance(seen, OSError) and (why := _current.why_refused(seen)) is not None:
            return os.fsdecode(seen.filename2 or seen.filename or "a file"), why
    # Writers in C++ and Rust raise errors of their own, which have no number.
    if _current.kind != "overlay" and any(words in str(error) for words in _REFUSED_WORDS):
        return "a file", _READ_ONLY
    return None


_REFUSED_WORDS = ("Permission denied", "Read-only file system", "(os error 13)", "(os error 30)")
_READ_ONLY = "your files are read-only for trials here"


def main() -> None:
    """Try the protections of this machine and print each as a line of JSON; the last line is the best one."""
    lacks = "this kernel has no Landlock (Linux 5.13 or newer has it, unless it is switched off)"
    fallback = FoundProtection("landlock") if sandbox.landlock_version() else FoundProtection("none", lacks)
    # Printed first: what follows may take longer than the caller waits.
    print(json.dumps(encode(fallback)), flush=True)
    if sys.platform != "linux":
        return
    scratch = make_scratch("autotune-probe-")
    try:
        # In a fork: the file systems cannot be uncovered.
        trying = ForkedRun(FoundProtection, lambda send: send(_try_namespace(scratch, fallback)))
        if (found := trying.result(_MOST_SECONDS)) is not None:
            print(json.dumps(encode(found)), flush=True)
    finally:
        scratch.remove()


def _try_namespace(scratch: Scratch, fallback: FoundProtection) -> FoundProtection:
    """Try to lay overlays over all files in this process; return the protection found.

    Where the kernel refuses a namespace, this is the kind of ``fallback``, with the reason. Where no overlay can be
    laid over the working folder, files are read-only.
    """
    cwd = os.getcwd()
    try:
        protected = Protected(Protection("overlay"), scratch, cwd)
        protected.begin()
    except OSError as error:
        why = f"no mount name space: {error.strerror}"
        return FoundProtection(fallback.kind, "; ".join(filter(None, (why, fallback.why_not_better))))
    if protected.covers(os.path.realpath(cwd)):
        return FoundProtection("overlay")
    return FoundProtection("read-only", f"no overlay can be laid over {cwd}")


if __name__ == "__main__":
    main()
