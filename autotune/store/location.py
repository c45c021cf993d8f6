"""Resolve the location of the database: from a path or URL of the user to a URL for SQLAlchemy.

SQLAlchemy is imported when a location is resolved, which takes as long as all the rest of a short command.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.core.errors import StorageError

if TYPE_CHECKING:
    from sqlalchemy import URL

DEFAULT_LOCATION = "studies/autotune.db"
LOCATION_VARIABLE = "AUTOTUNE_STORAGE"
"""The environment variable with the default location of the database."""

_URL_START = re.compile(r"[A-Za-z][A-Za-z0-9_+.-]*://")
_PLAIN_URL = "sqlite:///"
# What in a path may mean more than a plain path to SQLAlchemy.
_UNCERTAIN = re.compile(r"://|[?%#]")
POSTGRES_EXAMPLE = "postgresql+psycopg://user@host/database"
_POSTGRES_NAMES = ("postgresql", "postgres")
# Arguments of libpq, after the question mark of a URL, that are secret.
_SECRET_ARGUMENTS = frozenset({"password", "sslpassword"})
_SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite")
# File systems, as /proc/mounts names them, whose locks or shared memory do not work between machines. WAL needs both
# (https://www.sqlite.org/wal.html: "does not work over a network filesystem").
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "cifs", "smb", "smb3", "smbfs", "ncpfs", "gpfs", "beegfs", "ceph", "9p", "afs", "coda"}
    | {"gfs2", "ocfs2", "orangefs", "pvfs2", "panfs", "wekafs", "virtiofs", "vboxsf", "acfs", "snfs", "davfs"}
)
# FUSE file systems are mostly on a network (sshfs, glusterfs, s3fs, rclone, JuiceFS …), except these.
_LOCAL_FUSE = frozenset(
    {"fuse.fuse-overlayfs", "fuse.overlayfs", "fuse.bindfs", "fuse.gocryptfs", "fuse.encfs", "fuse.ntfs-3g"}
)


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a database. ``path`` is absolute, and ``None`` where it is not a SQLite file."""

    url: URL
    path: Path | None
    label: str
    """The user's own words without a password, for messages."""

    @property
    def is_postgres(self) -> bool:
        """Whether the database is one of a PostgreSQL server."""
        return self.url.get_backend_name() == "postgresql"

    @property
    def another(self) -> str:
        """The end of a hint: ``choose another file with --storage``, or ``database``."""
        return f"choose another {'file' if self.path is not None else 'database'} with --storage"

    def beside(self, name: str) -> Location:
        """Return the location of the SQLite file ``name`` in the same folder; messages show the same label."""
        assert self.path is not None
        path = self.path.with_name(name)
        return Location(self.url.set(database=str(path)), path, self.label)


def resolve_location(location: str) -> Location:
    """Resolve a path or a SQLAlchemy URL; raises ``StorageError`` for anything else.

    A URL of PostgreSQL without a driver means psycopg 3, whatever the version of SQLAlchemy takes by default.
    """
    from sqlalchemy import URL, make_url
    from sqlalchemy.exc import ArgumentError

    text = location.strip()
    if not text:
        raise StorageError("the database has no name", f"give a path to --storage, {DEFAULT_LOCATION} say")
    if not _URL_START.match(text):
        if text == ":memory:" or text.startswith(("sqlite:", "file:")):
            raise _not_a_file_error(text)
        return _file_location(URL.create("sqlite"), text, text)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        # The cause holds the text, and with it a password.
        raise StorageError(
            f"{_without_password(text)!r} is not a database URL",
            f"write it as sqlite:///path/to/file.db or {POSTGRES_EXAMPLE}",
        ) from (None if "@" in text else error)
    if url.drivername in _POSTGRES_NAMES:
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() != "sqlite":
        shown = url.update_query_dict({name: "***" for name in url.query if name in _SECRET_ARGUMENTS})
        return Location(url, None, shown.render_as_string(hide_password=True))
    database = url.database or ""
    if url.drivername not in _SQLITE_DRIVERS or database in ("", ":memory:") or database.startswith("file:"):
        raise _not_a_file_error(text)
    return _file_location(url, database, text)


def plain_path(location: str) -> Path | None:
    """Return the path of a location that is surely a plain SQLite file; ``None`` where SQLAlchemy has to tell."""
    text = location.strip()
    name = text.removeprefix(_PLAIN_URL)
    if not name or name.startswith((":", "sqlite:", "file:")) or _UNCERTAIN.search(name) or _surrogates(name):
        return None
    try:
        return Path(name).expanduser().absolute()
    except (RuntimeError, ValueError):
        return None


def _file_location(url: URL, name: str, label: str) -> Location:
    """Return the location of a SQLite file. Raises ``StorageError`` for a path that no URL can contain."""
    from sqlalchemy import make_url

    try:
        path = Path(name).expanduser().absolute()
    except (RuntimeError, ValueError) as error:
        # ValueError: a NUL in the name of the user whose home folder it is.
        raise StorageError(f"{label!r} begins with a home folder that is not known", "write the whole path") from error
    if _surrogates(str(path)):
        raise StorageError(f"{label!r} is not valid Unicode", "choose another name with --storage")
    location = Location(url.set(database=str(path)), path, label)
    # Other processes get the URL as text, in which SQLAlchemy before 2.1 loses a question mark.
    if make_url(location.url.render_as_string(hide_password=False)).database != str(path):
        raise StorageError(f"{label!r} cannot be written as a database URL", "choose a name without a question mark")
    return location


def shown_location(location: str) -> str:
    """Return a location without its password, for messages."""
    return _without_password(location) if _URL_START.match(location.strip()) else location


def _without_password(text: str) -> str:
    """Replace the password in a URL, valid or not, by stars."""
    text = re.sub(r"(://[^:/@]*:).*@", r"\1***@", text)
    return re.sub(rf"([?&](?:{'|'.join(sorted(_SECRET_ARGUMENTS))})=)[^&]*", r"\1***", text)


def _surrogates(text: str) -> bool:
    """Return whether a path has surrogate characters, for bytes that are not UTF-8. No URL can contain them."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _not_a_file_error(text: str) -> StorageError:
    """Return the error for SQLite databases that are no file of their own, such as those in memory."""
    return StorageError(
        f"{text!r} does not name a SQLite file", "give a path such as studies/autotune.db, or sqlite:///path/to/file.db"
    )


def on_network_file_system(path: Path, mounts: str | None = None) -> bool:
    """Return whether ``path`` is on a file system shared between machines.

    ``mounts`` is the text of ``/proc/mounts``, which is read if it is not given. Without that file (macOS) the answer
    is no.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return False
    # The file system of the longest mount point above the file, and its kind.
    target = os.path.realpath(path)
    longest, kind = 0, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        # Special characters are written as a backslash and three octal digits.
        mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[1])
        is_below = target == mount_point or target.startswith(mount_point.rstrip("/") + "/")
        # Of two mounts at one place, the later hides the earlier.
        if is_below and len(mount_point) >= longest:
            longest, kind = len(mount_point), fields[2]
    is_shared_fuse = kind.startswith("fuse.") and kind not in _LOCAL_FUSE
    return is_shared_fuse or kind in _NETWORK_FILE_SYSTEMS
