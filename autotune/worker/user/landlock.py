"""Have the kernel refuse to write to any file but those of some folders, for this process and all that it starts.

Landlock needs no rights, and Linux 5.13 or newer. It knows nothing of modes, times, owners and attributes, so that an
audit hook refuses those to Python. Before version 3 (Linux 6.2) it does not know ``truncate`` by name either.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import platform
import struct
import sys
from collections.abc import Sequence
from typing import Any

from autotune.worker.user.mount_namespace import is_within

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_SET_NO_NEW_PRIVS = 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# Rights on files; the others are on folders.
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14
# All up to making symbolic links; then moving between folders and truncating.
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1}
_RIGHTS = (1 << 15) - 1

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "nvidia*", "dri", "kfd", "infiniband",
            "gdrdrv")  # fmt: skip
_IN_FOLDER = frozenset({"os.chmod", "os.chown", "os.utime"})
"""Events whose last argument is an open folder, or -1."""
_REFUSED = _IN_FOLDER | {"os.setxattr", "os.removexattr", "os.truncate"}

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of Landlock in this kernel; 0 where it is missing or disabled."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64", "ppc64le", "riscv64", "s390x"):
        return 0
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def restrict(folders: Sequence[str]) -> None:
    """Limit this thread and its children to write to these folders. Raises ``OSError`` where that fails."""
    rights = _RIGHTS_BY_VERSION.get(version(), _RIGHTS)
    request = struct.pack("=Q", rights)
    ruleset = _libc.syscall(_CREATE_RULESET, request, len(request), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "no Landlock ruleset can be made")
    try:
        _allow(ruleset, "/", rights & _READ)
        for folder in folders:
            _allow(ruleset, folder, rights)
        _allow(ruleset, "/proc", rights & (_READ | _WRITE_FILE))
        for path in (path for name in _DEVICES for path in glob.glob(f"/dev/{name}")):
            _allow(ruleset, path, rights & (_READ | _WRITE_FILE))
        if _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.syscall(_RESTRICT_SELF, ruleset, 0):
            raise OSError(ctypes.get_errno(), "Landlock cannot be switched on")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow rights beneath a path, if it exists."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = rights if os.path.isdir(path) else rights & _OF_FILES
        if _libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0):
            raise OSError(ctypes.get_errno(), f"Landlock has no rule for {path}")
    finally:
        os.close(fd)


def refuse_attributes(folders: Sequence[str]) -> None:
    """Refuse changes of modes, times, owners and attributes outside these folders, in Python and its forks."""

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _REFUSED or (event == "os.truncate" and isinstance(arguments[0], int)):
            # A file that is open to be written to was allowed to be.
            return
        for path in _paths(arguments[0], arguments[-1] if event in _IN_FOLDER else -1):
            if not any(is_within(path, folder) for folder in folders):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    sys.addaudithook(on_event)


def _paths(given: Any, folder: int) -> list[str]:
    """Return the paths of an argument: a name, perhaps in an open folder, or an open file; a link's target too."""
    try:
        if isinstance(given, int):
            return [os.readlink(f"/proc/self/fd/{given}")]
        path = os.fsdecode(given)
        if folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    except OSError:
        return [str(given)]
    parent, name = os.path.split(os.path.abspath(path))
    return [os.path.join(os.path.realpath(parent), name), os.path.realpath(path)]
