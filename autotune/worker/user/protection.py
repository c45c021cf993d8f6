"""Keep the user's own code from touching their files, whatever it and the processes that it starts do.

What stays open to it on purpose: the job's temporary folder, devices, shared memory, and the caches of compilers and of
the Hugging Face hub, which would never be warm otherwise.

``python -m autotune.worker.user.protection`` tells, in lines of JSON, how that can be done here; the last line is the
best way. It is run once by a process that searches.
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
    """

    def __init__(self, protection: Protection, scratch: Scratch, cwd: str, rank: int = 0) -> None:
        self.kind: ProtectionKind = protection.kind
        self._scratch = scratch
        self._cwd = cwd
        self._layer = protection.layer
        self._outside = [scratch.path, *caches(cwd)]
        self._cover: sandbox.Cover | None = None
        self._is_user_space = False
        self._is_covered = False
        self._made_by = os.getpid()
        self._has_namespace = self.kind in ("overlay", "read-only")
        if self._has_namespace and rank == 0:
            self._is_user_space = sandbox.open_namespace()
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
        """Cover the files for a run of the user's code, in this process and its children.

        Does nothing if called again in the same process, or with Landlock.
        """
        if self._is_covered or not self._has_namespace:
            return
        self._is_covered = True
        if os.getpid() != self._made_by:
            # Each run of a job has mounts of its own.
            sandbox.copy_namespace()
        below = self._layer if self._layer is not None and os.path.isdir(self._layer) else None
        works_in = [os.path.realpath(path) for path in (self._cwd, Path.home()) if os.path.isdir(path)]
        self._cover = sandbox.Cover(self._scratch.layers, self._outside, works_in, self._is_user_space, below)
        self._cover.lay(int(_SHARE_OF_MEMORY * psutil.virtual_memory().available))
        if self._is_user_space:
            sandbox.drop_capabilities()

    def join(self, pid: int) -> None:
        """Join another process's protection, so that ranks see each other's files."""
        if self._has_namespace:
            self._is_covered = True
            cwd = os.getcwd()
            self._is_user_space = sandbox.join_namespace(pid)
            os.chdir(cwd)
            if self._is_user_space:
                sandbox.drop_capabilities()

    def covers(self, path: str) -> bool:
        """Return whether writes to a path go to the layers of this process, not to the user's files."""
        return self._cover is not None and self._cover.covers(path)

    def why_refused(self, error: OSError) -> str | None:
        """Return the reason where the protection caused a write to fail; ``None`` for other causes."""
        if error.errno == errno.EROFS:
            return _READ_ONLY if self.kind == "read-only" else "nothing can be laid over its folder here"
        if self._is_user_space and error.errno == errno.EOVERFLOW:
            return "it is of another user or group, so that only root can lay something over it"
        if error.errno == errno.ENOSPC and self._cover is not None and self._cover.in_memory:
            return "what trials write is kept in memory here, and there was not enough"
        if self.kind != "landlock" or error.errno not in (errno.EACCES, errno.EPERM, errno.EXDEV):
            return None
        path = os.path.realpath(os.fsdecode(error.filename)) if error.filename else "/"
        # access(2) does not ask Landlock: what that allows, Landlock has refused.
        existing = path if os.path.lexists(path) else os.path.dirname(path)
        is_outside = any(sandbox.is_within(path, folder) for folder in self.writable)
        return _READ_ONLY if not is_outside and os.access(existing, os.W_OK) else None

    def keep(self) -> None:
        """Keep the files that this run has written, for later jobs with the same layer. Layers in memory are lost."""
        if self._cover is not None and not self._cover.in_memory:
            Path(self._scratch.kept_file).write_text(self._cover.run, encoding="utf-8")


_current: Protected | None = None
"""The protection of this process, which cannot leave its name spaces; ``None`` without one."""


def protect(protection: Protection, scratch: Scratch, cwd: str, ranks: Ranks, *, shares: bool) -> None:
    """Protect the user's files from now on, before this process starts another thread.

    Written files are shared by all runs of the job's ranks, or else go to another layer for each process that runs the
    code. Raises ``OSError`` where the kernel refuses.
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
    """Begin a run of the user's code in this process, under the current protection."""
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
        self._look_at = 0.0

    def why_exceeded(self) -> str | None:
        """Return why the job must end, if it wrote too much; ``None`` otherwise. Checks the disk only now and then."""
        began = time.monotonic()
        if began < self._look_at:
            return None
        written_bytes = 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with contextlib.suppress(OSError):
                    written_bytes += os.lstat(os.path.join(folder, name)).st_blocks * 512
        # Counting many files must not disturb what is measured.
        self._look_at = time.monotonic() + max(1.0, 50 * (time.monotonic() - began))
        if written_bytes <= self._most_bytes:
            return None
        return (
            f"its code wrote {format_bytes(written_bytes)}, more than half of what was free in "
            f"{os.path.dirname(self._folder)}"
        )


def take_kept(scratch: Scratch, layer: str) -> None:
    """Move the files that a finished job has kept to a layer's folder; do nothing where the job kept none."""
    try:
        run = Path(scratch.kept_file).read_text(encoding="utf-8")
        names = os.listdir(run)
    except OSError:
        return
    for name in names:
        upper = os.path.join(run, name, "upper")
        with contextlib.suppress(OSError):
            # To be moved, a folder must be writable itself.
            os.chmod(upper, 0o700)
            if os.listdir(upper):
                os.rename(upper, os.path.join(layer, name))


def caches(cwd: str) -> list[str]:
    """Return existing cache folders that may be written: of compilers, of the hub, of torch.

    The user's working folder is never one of them. The hub's folder and, with a GPU, the compiler's are created if
    missing: otherwise their files would be discarded with the layer.
    """
    uses_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folders = {}
    for name, default in _CACHES.items():
        path = os.environ.get(name) or default.replace("~/.cache", shared)
        folders[path] = name == "HF_HOME" or uses_gpu
    folders |= dict.fromkeys((os.environ.get(name) or default for name, default in _PIPES.items()), False)
    folders |= dict.fromkeys(filter(None, map(os.environ.get, _NAMED_CACHES)), False)
    theirs = [os.path.realpath(path) for path in (cwd, Path.home())]
    listed = []
    for name, is_made in folders.items():
        path = os.path.realpath(os.path.expanduser(name))
        with contextlib.suppress(OSError):
            if is_made:
                os.makedirs(path, exist_ok=True)
        if os.path.isdir(path) and not any(sandbox.is_within(folder, path) for folder in theirs):
            listed.append(path)
    return listed


# How a file that cannot be written is told


def refused_write(error: BaseException) -> tuple[str, str] | None:
    """Return file and reason of a write that was refused to the user's code; ``None`` for other errors."""
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


# What this machine offers


def main() -> None:
    """Try the protections of this machine and print each as a line of JSON; the last line is the best one."""
    lacks = "this kernel has no Landlock (Linux 5.13 or newer has it, unless it is switched off)"
    least = FoundProtection("landlock") if sandbox.landlock_version() else FoundProtection("none", lacks)
    print(json.dumps(encode(least)), flush=True)
    if sys.platform != "linux":
        return
    scratch = make_scratch("autotune-probe-")
    try:
        # In a fork: the file systems cannot be uncovered.
        trying = ForkedRun(FoundProtection, lambda send: send(_try_namespace(scratch, least)))
        if (found := trying.result(_MOST_SECONDS)) is not None:
            print(json.dumps(encode(found)), flush=True)
    finally:
        scratch.remove()


def _try_namespace(scratch: Scratch, least: FoundProtection) -> FoundProtection:
    """Try to cover the files in this process; return the protection found, or ``least`` where that fails."""
    cwd = os.getcwd()
    try:
        protected = Protected(Protection("overlay"), scratch, cwd)
        protected.begin()
    except OSError as error:
        why = f"no mount name space: {error.strerror}"
        return FoundProtection(least.kind, "; ".join(filter(None, (why, least.why_not_better))))
    if protected.covers(os.path.realpath(cwd)):
        return FoundProtection("overlay")
    return FoundProtection("read-only", f"no overlay can be laid over {cwd}")


if __name__ == "__main__":
    main()
