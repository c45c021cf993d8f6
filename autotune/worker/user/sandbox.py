"""Have the kernel keep files from this process and all that it starts: a layer over file systems, or refused writes.

Each file system that can be written is covered by an overlayfs. Where nothing can be laid over a folder, it is
read-only.

Root builds a new tree of mounts beside the old one, and moves into it. Another user also needs a user name space, in
which mounts of the machine cannot be taken apart (the kernel calls them locked): no overlay can be laid over a folder
with such mounts below it. There the entries of the folder are covered one by one, and its own files are read-only.

Landlock needs no rights, and Linux 5.13 or newer. It knows nothing of modes, times, owners and attributes, so that an
audit hook refuses those to Python. Before version 3 (Linux 6.2) it does not know ``truncate`` by name either.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import os
import platform
import re
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# sched.h, sys/mount.h, linux/capability.h
_NEW_MOUNTS, _NEW_USERS, _DETACH = 0x20000, 0x10000000, 2
_READ_ONLY, _REMOUNT, _BIND, _MOVE, _RECURSIVE, _PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18
_RELATIME_IN_STATVFS, _RELATIME = 4096, 1 << 21
# nosuid, nodev, noexec, noatime and nodiratime have the same bits in statvfs as in mount.
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048
_CAPABILITY_VERSION = 0x20080522

# File systems of the kernel's own, which hold nobody's files.
_OF_KERNEL = frozenset({
    "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "hugetlbfs", "debugfs", "tracefs",
    "securityfs", "bpf", "pstore", "efivarfs", "configfs", "fusectl", "binfmt_misc", "autofs", "rpc_pipefs", "nsfs",
    "selinuxfs",
})  # fmt: skip
_KERNEL_FOLDERS = ("/dev", "/proc", "/sys")
SHARED_MEMORY = "/dev/shm"
# Of a folder with more entries than this, which would each be covered, all is read-only but what the user works in.
_MOST_ENTRIES = 500

_libc = ctypes.CDLL(None, use_errno=True)


def _raise_on_error(result: int, what: str) -> None:
    """Raise ``OSError`` with the error of the last call of libc, named ``what``, if its result says so."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2) with a file system of this kind. Raises ``OSError``."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else os.fsencode(options)
    _raise_on_error(_libc.mount(*texts, ctypes.c_ulong(flags), data), f"mount {kind or flags} on {target}")


def _open_path(path: str) -> int:
    """Return a file descriptor that stands for a path, whatever is mounted on it later."""
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def is_within(path: str, folder: str) -> bool:
    """Return whether a path is a folder or inside it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def open_namespace() -> bool:
    """Move this process to a new mount namespace, in which it may mount without others seeing it.

    Return whether this needed a user namespace, too. The process must have a single thread. Raises ``OSError`` where
    the kernel allows neither.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _raise_on_error(_libc.unshare(_NEW_MOUNTS), "unshare")
        has_user_namespace = False
    except PermissionError:
        _raise_on_error(_libc.unshare(_NEW_USERS | _NEW_MOUNTS), "unshare")
        has_user_namespace = True
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
                file.write(text)
    # Else mounts made here would appear in the whole machine, and the machine's later ones here.
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    return has_user_namespace


def copy_namespace() -> None:
    """Move this process to a copy of its parent's mount namespace, so that its mounts are its own."""
    _raise_on_error(_libc.unshare(_NEW_MOUNTS), "unshare")


def join_namespace(pid: int) -> bool:
    """Join the namespaces of a process that has covered the file systems; return whether one is a user namespace."""
    has_user_namespace = False
    for name, kind in (("user", _NEW_USERS), ("mnt", _NEW_MOUNTS)):
        theirs = f"/proc/{pid}/ns/{name}"
        if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{name}"):
            continue  # Both are in it already.
        fd = os.open(theirs, os.O_RDONLY)
        try:
            _raise_on_error(_libc.setns(fd, kind), f"setns {name}")
        finally:
            os.close(fd)
        has_user_namespace |= name == "user"
    return has_user_namespace


def drop_capabilities() -> None:
    """Drop all capabilities of this process: in a user namespace, the user's code must not have those of root."""
    # struct __user_cap_header_struct: version and process; three zeros for each half of the capabilities.
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0))
    _raise_on_error(_libc.capset(header, bytes(24)), "capset")


@dataclass(frozen=True)
class _Mounted:
    """A mount that can be seen, and an open file descriptor of its root."""

    path: str
    fd: int
    kind: str
    is_read_only: bool
    is_folder: bool


def _mounts() -> list[_Mounted]:
    """Return the mounts that are visible (not hidden by a later one at the same path), from the root down."""
    mounts = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            number, _, _, _, escaped, options, *_ = left.split(" ")
            # Spaces and the like are written as three octal digits.
            path = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), escaped)
            try:
                fd = _open_path(path)
            except OSError:
                continue
            with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as fd_info:
                found_number = next(line.split()[1] for line in fd_info if line.startswith("mnt_id:"))
            try:
                is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            except OSError:
                found_number = ""  # One of FUSE shuts out all but the user who mounted it, root too.
            if found_number != number:
                os.close(fd)
                continue
            mounts.append(_Mounted(path, fd, right.split(" ")[0], "ro" in options.split(","), is_folder))
    return sorted(mounts, key=lambda mount: (mount.path != "/", mount.path.count("/"), mount.path))


def _fd_path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


@dataclass
class Cover:
    """The layers over the user's files in one run of their code. What the run writes goes to them.

    Each is the upper folder of an overlayfs, in a folder of the job. File systems without a layer are read-only.
    """

    layers: str
    """The folder of the job in which every run has its layers. It is hidden from the run."""
    outside: Sequence[str]
    """Folders that are not covered, so that writes to them stay."""
    works_in: Sequence[str]
    """Folders of the user's that must be covered, whoever owns the folders above them."""
    has_user_namespace: bool
    below: str | None = None
    """A folder with what an earlier run has written, which lies between the user's files and what is written now."""
    in_memory: bool = False
    """Whether the layers are in memory, since the disk of the job's folder cannot hold any."""
    run: str = ""
    """The folder with the layers of this run."""
    _mounts: list[_Mounted] = field(default_factory=list)
    _covered: list[str] = field(default_factory=list)
    _uncoverable: list[str] = field(default_factory=list)
    """In a user namespace: folders that must not lie below the root of an overlay, see ``_last_of_others``."""
    _run_fd: int = -1
    _new_root: str = ""
    """The new tree of mounts, if one is built; else the mounts of the old tree are covered in place."""

    def lay(self, memory_bytes: int) -> None:
        """Cover all file systems by overlays, or make them read-only. Raises ``OSError`` where that fails.

        Layers in memory may take ``memory_bytes``.
        """
        cwd = os.getcwd()
        self.run = os.path.join(self.layers, str(os.getpid()))
        os.makedirs(self.run)
        self._mounts = _mounts()
        self._uncoverable = [_last_of_others(path) for path in self.works_in] if self.has_user_namespace else []
        kept_open = [(path, _open_path(path)) for path in self.outside if os.path.isdir(path)]
        sockets = list(_sockets())
        try:
            self._choose_layer_storage(memory_bytes)
            os.mkdir(tree := os.path.join(self.run, "root"))
            # In a user namespace, folders of others must lie on the way to a layer, not in it: see _last_of_others.
            if not self.has_user_namespace and self._overlay("/", tree):
                self._new_root = tree
            for mount in self._mounts:
                self._cover_mount(mount)
            self._cover_shared_memory()
            for path, fd in kept_open:
                _mount(_fd_path(fd), self._new_root + path, None, _BIND | _RECURSIVE)
            # Hides the layers themselves.
            _mount("none", self._new_root + self.layers, "tmpfs", 0, "size=4k,mode=755")
            self._bind_sockets(sockets)
            # In a new tree, what is not covered is read-only already.
            for mount in self._mounts if not self._new_root else ():
                if not (self._is_left_alone(mount) or self.covers(mount.path)):
                    _set_read_only(mount.path)
        finally:
            for fd in [self._run_fd, *(mount.fd for mount in self._mounts), *(fd for _, fd in kept_open + sockets)]:
                with contextlib.suppress(OSError):
                    os.close(fd)
        if self._new_root:
            # As switch_root does. Another process that joins comes to what is mounted last on the root.
            os.chdir(self._new_root)
            _mount(".", "/", None, _MOVE)
            os.chroot(".")
        # Entered again by its name: this process is still in the user's folder, below the layer.
        os.chdir(cwd)

    def _cover_shared_memory(self) -> None:
        """Cover the folders that somebody made in /dev/shm. What processes share lies beside them, uncovered."""
        with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._overlay(entry.path, self._new_root + entry.path)

    def _bind_sockets(self, sockets: Sequence[tuple[str, int]]) -> None:
        """Bind sockets of other processes over their layers, read-only: in a layer they would reach nobody."""
        for path, fd in sockets:
            if self.covers(path):
                with contextlib.suppress(OSError):
                    _mount(_fd_path(fd), self._new_root + path, None, _BIND)
                    _set_read_only(self._new_root + path)

    def covers(self, path: str) -> bool:
        """Return whether writes to a path go to an overlay."""
        return any(is_within(path, folder) for folder in self._covered)

    def _choose_layer_storage(self, memory_bytes: int) -> None:
        """Test an overlay over an empty folder; keep the layers in memory where the disk does not support them."""
        for in_memory in (False, True):
            if in_memory:
                _mount("none", self.run, "tmpfs", 0, f"size={memory_bytes},mode=700")
                os.close(self._run_fd)
            # The layers are reached through it: a layer over the job's folder hides their names.
            self._run_fd = _open_path(self.run)
            empty = os.path.join(self.run, "empty")
            os.mkdir(empty)
            if self._overlay(empty, empty):
                _raise_on_error(_libc.umount2(os.fsencode(empty), 0), "umount")
                self._covered.clear()
                self.in_memory = in_memory
                return

    def _overlay(self, path: str, target: str, fd: int | None = None) -> bool:
        """Mount an overlay of the folder ``path``, or of its open ``fd``, at ``target``; return whether it worked."""
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        layer = f"{_fd_path(self._run_fd)}/{name}"
        # Only in the machine's first user namespace may an overlay use trusted attributes; elsewhere the user's.
        attributes = "" if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"] else ",userxattr"
        with contextlib.ExitStack() as stack:

            def opened(folder: str) -> str:
                fd = _open_path(folder)
                stack.callback(os.close, fd)
                return _fd_path(fd)

            try:
                lower = opened(path) if fd is None else _fd_path(fd)
                os.makedirs(os.path.join(layer, "upper"), exist_ok=True)
                os.makedirs(os.path.join(layer, "work"), exist_ok=True)
                _copy_attributes(os.path.join(layer, "upper"), lower)
                if self.below and os.path.isdir(kept := os.path.join(self.below, name)):
                    for part in ("kept", "empty"):
                        os.makedirs(os.path.join(layer, part))
                    # The folder may lie within the files below it, which no two layers may. As a file system of its
                    # own it does not. What was deleted is there again: the code deletes it again.
                    lowers = f"lowerdir={opened(kept)}:{layer}/empty"
                    _mount("overlay", f"{layer}/kept", "overlay", _READ_ONLY, lowers + attributes)
                    stack.callback(_libc.umount2, os.fsencode(f"{layer}/kept"), _DETACH)  # An overlay holds it.
                    lower = f"{opened(f'{layer}/kept')}:{lower}"
                # By file descriptors, since names may have commas and colons.
                options = f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work"
                _mount("overlay", target, "overlay", 0, options + attributes)
            except OSError:
                return False
        self._covered.append(path)
        return True

    def _cover_mount(self, mount: _Mounted) -> None:
        """Cover a mount by an overlay, or else bind it read-only or cover its subfolders. Bind one left alone."""
        if mount.path == "/":
            if not self._new_root:
                self._cover_entries("/")
            return
        target = self._new_root + mount.path
        is_left_alone = self._is_left_alone(mount)
        is_whole = not any(folder != mount.path and is_within(folder, mount.path) for folder in self._uncoverable)
        if not is_left_alone and mount.is_folder and is_whole and self._overlay(mount.path, target, mount.fd):
            return
        if self._new_root or self.covers(mount.path):
            _mount(_fd_path(mount.fd), target, None, _BIND)
            if not is_left_alone:
                _set_read_only(target)
        elif not is_left_alone and mount.is_folder:
            self._cover_entries(mount.path)

    def _is_left_alone(self, mount: _Mounted) -> bool:
        """Return whether a mount stays as it is: one of the kernel, one outside, or one already read-only."""
        folders = (*_KERNEL_FOLDERS, *self.outside)
        is_spared = mount.kind in _OF_KERNEL or any(is_within(mount.path, folder) for folder in folders)
        return is_spared or mount.is_read_only

    def _cover_entries(self, folder: str) -> None:
        """Cover each subfolder of a folder that cannot be covered as a whole; of very many only those worked in."""
        try:
            with os.scandir(folder) as entries:
                paths = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        mounted = [mount.path for mount in self._mounts]
        needed = (*self.works_in, *self._uncoverable)
        for path in paths:
            if path in mounted:
                continue
            if any(inner != path and is_within(inner, path) for inner in (*mounted, *self._uncoverable)):
                self._cover_entries(path)
            elif len(paths) <= _MOST_ENTRIES or any(is_within(inner, path) for inner in needed):
                self._overlay(path, path)


def _last_of_others(path: str) -> str:
    """Return the innermost folder of another owner or group on a path, or its topmost folder below the root.

    In a user namespace such a folder cannot be copied to a layer, which a write to a file below it would need: an
    overlay must begin at the folder or below it.
    """
    parents = [path, *(str(parent) for parent in Path(path).parents)][:-1]
    for parent in parents:
        status = os.stat(parent)
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            return parent
    return parents[-1]


def _copy_attributes(upper: str, lower: str) -> None:
    """Give the root of a layer the mode, owner and times of the folder below it."""
    status = os.stat(lower)
    mode = stat.S_IMODE(status.st_mode)
    if os.geteuid() == 0:
        os.chown(upper, status.st_uid, status.st_gid)
    elif status.st_uid != os.geteuid():
        # It cannot be given away: its owner may do with it what they may with the folder below.
        may = sum(bit for bit in (os.R_OK, os.W_OK, os.X_OK) if os.access(lower, bit))
        mode = may * 0o111
    os.chmod(upper, mode)
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))


def _set_read_only(path: str) -> None:
    """Make a mount read-only, and keep its other flags."""
    flags = os.statvfs(path).f_flag
    kept = (flags & _KEPT_FLAGS) | (_RELATIME if flags & _RELATIME_IN_STATVFS else 0)
    _mount(None, path, None, _BIND | _REMOUNT | _READ_ONLY | kept)


def _sockets() -> Iterator[tuple[str, int]]:
    """Yield the paths of Unix sockets that have a name in the file system, and open file descriptors of them."""
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            path = line.rstrip("\n").split(maxsplit=7)[-1]
            if path.startswith("/"):
                with contextlib.suppress(OSError):
                    yield path, _open_path(path)


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


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 where it is missing, disabled, or the platform not supported."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64", "ppc64le", "riscv64", "s390x"):
        return 0
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def restrict_writes(folders: Sequence[str]) -> None:
    """Limit this thread and its children to write to these folders, /proc and devices.

    Raises ``OSError`` where that fails.
    """
    rights = _RIGHTS_BY_VERSION.get(landlock_version(), _RIGHTS)
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
    """Add a rule to a Landlock ruleset that allows ``rights`` beneath a path, if it exists."""
    try:
        fd = _open_path(path)
    except FileNotFoundError:
        return
    try:
        rights = rights if os.path.isdir(path) else rights & _OF_FILES
        if _libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0):
            raise OSError(ctypes.get_errno(), f"Landlock has no rule for {path}")
    finally:
        os.close(fd)


def refuse_attributes(folders: Sequence[str]) -> None:
    """Refuse truncation by name and changes of modes, times, owners and attributes outside these folders.

    Landlock does not. An audit hook sees calls from Python alone, in this process and its forks.
    """

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _REFUSED or (event == "os.truncate" and isinstance(arguments[0], int)):
            # A file that is open to be written to was allowed to be.
            return
        for path in _paths(arguments[0], arguments[-1] if event in _IN_FOLDER else -1):
            if not any(is_within(path, folder) for folder in folders):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    sys.addaudithook(on_event)


def _paths(given: Any, folder_fd: int) -> list[str]:
    """Return the real paths of a call's first argument: of a link, both the link's and its target's.

    ``given`` is a file descriptor, or a name in the open folder ``folder_fd`` (-1: in the working folder).
    """
    try:
        if isinstance(given, int):
            return [os.readlink(f"/proc/self/fd/{given}")]
        path = os.fsdecode(given)
        if folder_fd >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder_fd}"), path)
    except OSError:
        return [str(given)]
    parent, name = os.path.split(os.path.abspath(path))
    return [os.path.join(os.path.realpath(parent), name), os.path.realpath(path)]
