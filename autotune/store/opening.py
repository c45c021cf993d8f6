"""Open the database: create it if missing, migrate it with Alembic if old, refuse it if it is another program's."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, inspect

import autotune
from autotune.core.errors import StorageError
from autotune.core.scratch import private_opener
from autotune.store.engine import (
    LOCK_TIMEOUT_SECONDS,
    build_engine,
    choose_journal,
    migration_lock,
    storage_errors,
    transaction,
)
from autotune.store.location import Location, on_network_file_system, resolve_location
from autotune.store.records import new_id
from autotune.store.repository import Store
from autotune.store.tables import PREFIX, VERSION_TABLE


def open_store(location: str, *, create: bool = True, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Store:
    """Open the database at a path or SQLAlchemy URL, with autotune's tables up to date.

    A missing file is created, with its folders, unless ``create`` is false; so are the tables in a server's database.
    Raises ``StorageError``, and leaves the database unchanged, where it is missing, locked, damaged, not writable,
    another program's, or from a newer autotune, where the file is no database, and where a server cannot be reached.
    Tables of Optuna, in which older versions recorded trials a second time, are left as they are.
    """
    place = resolve_location(location)
    with storage_errors(place.label):
        if place.path is not None:
            if create and not place.path.exists():
                _create_file(place, place.path, lock_timeout_seconds)
            _check_file(place, place.path)
        return _open(place, lock_timeout_seconds, create=create)


def current_revision(location: str) -> tuple[str | None, str]:
    """Return the revision of autotune's tables in the database (``None`` without tables), and the newest one.

    Writes nothing. Raises ``StorageError`` where there is no such database or it cannot be read.
    """
    place = resolve_location(location)
    with storage_errors(place.label):
        if place.path is not None:
            _check_file(place, place.path)
        engine = build_engine(place, LOCK_TIMEOUT_SECONDS)
        try:
            with transaction(engine, writes=False) as connection:
                return recorded_revision(connection), head_revision()
        finally:
            engine.dispose()


def upgrade(location: str) -> tuple[str | None, str]:
    """Upgrade autotune's tables to the newest revision; return the former one (``None`` without tables) and the newest.

    A missing file is created. Raises ``StorageError`` as ``open_store`` does.
    """
    place = resolve_location(location)
    is_missing = place.path is not None and not os.path.lexists(place.path)
    before = None if is_missing else current_revision(location)[0]
    open_store(location).close()
    return before, head_revision()


def _check_file(place: Location, path: Path) -> None:
    """Raise ``StorageError`` unless there is a file at this path."""
    if not path.exists():
        raise StorageError(
            f"there is no database at {place.label}", "run a search first, or name its file with --storage"
        )
    # The file is not read here: closing it would release SQLite's locks of every other connection in this process
    # (https://www.sqlite.org/howtocorrupt.html, section 2.2).
    if path.is_dir():
        raise StorageError(f"{place.label} is a folder", "name a file within it with --storage")


def _create_file(place: Location, path: Path, lock_timeout_seconds: float) -> None:
    """Create a database file with tables under a temporary name, and move it into place when it is complete.

    So no process sees an incomplete database, whether this process is killed, the disk is full, or another process
    creates the same file at the same time (the first file stays).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = place.beside(f".{path.name}.{new_id()[:8]}.new")
    assert draft.path is not None
    try:
        # SQLite gives the files beside it the same mode.
        os.close(private_opener(str(draft.path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        _upgrade_tables(draft, lock_timeout_seconds)
        try:
            # Unlike a rename, a link replaces no file that another process made meanwhile.
            os.link(draft.path, path)
        except FileExistsError:
            pass
        except OSError:
            # A file system without hard links.
            if not path.exists():
                draft.path.rename(path)
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            draft.path.with_name(draft.path.name + suffix).unlink(missing_ok=True)


def _open(place: Location, lock_timeout_seconds: float, *, create: bool) -> Store:
    """Open a database and upgrade its tables, after checks that write nothing: a refused database stays unchanged."""
    engine = build_engine(place, lock_timeout_seconds)
    try:
        has_tables, is_current = _inspect(engine, place)
        if place.path is None and not create and not has_tables:
            raise StorageError(
                f"there are no studies of autotune in {place.label}",
                "run a search first, or name the database of one with --storage",
            )
        if not is_current:
            # One process at a time; another may have done it while this one waited.
            with migration_lock(engine):
                _, is_current = _inspect(engine, place)
                if not is_current:
                    _upgrade_tables(place, lock_timeout_seconds)
        if place.path is not None:
            choose_journal(engine, shared_file_system=on_network_file_system(place.path))
        return Store(place, engine)
    except BaseException:
        engine.dispose()
        raise


def _inspect(engine: Engine, place: Location) -> tuple[bool, bool]:
    """Return whether the database has autotune's tables, and whether their revision is the newest.

    Raises ``StorageError`` for the file of another program, and for tables of a newer autotune.
    """
    with transaction(engine, writes=False) as connection:
        names = inspect(connection).get_table_names()
        has_tables = any(name.startswith(PREFIX) for name in names)
        # Older versions kept Optuna's tables, among them version_info, in the same database.
        may_be_ours = has_tables or not names or "version_info" in names
        # A server's database is often shared with other programs, a file hardly ever.
        if place.path is not None and not may_be_ours:
            raise StorageError(
                f"{place.label} is another program's database (its tables: {', '.join(sorted(names)[:3])} …)",
                "choose another file with --storage",
            )
        revision = recorded_revision(connection)
    known, head = _revisions(migrations_folder())
    if revision is not None and revision not in known:
        raise StorageError(
            f"{place.label} was written by a newer autotune (revision {revision}, this one knows {head})",
            f"upgrade autotune, or {place.another}",
        )
    return has_tables, revision is not None and revision == head


@functools.cache
def _revisions(folder: Path) -> tuple[frozenset[str], str | None]:
    """Return all revisions in a folder, and the newest; cached, since this was a third of opening a store."""
    scripts = ScriptDirectory(folder)
    return frozenset(script.revision for script in scripts.walk_revisions()), scripts.get_current_head()


def migrations_folder() -> Path:
    """Return Alembic's folder: ``autotune/_migrations`` when installed, ``alembic`` in a checkout."""
    package = Path(autotune.__file__).resolve().parent
    for folder in (package / "_migrations", package.parent / "alembic"):
        # ``alembic`` beside an installed package may be the library itself, which has no env.py.
        if (folder / "env.py").is_file() and (folder / "versions").is_dir():
            return folder
    raise StorageError(f"this installation of autotune at {package} lacks its migrations", "install it again with pip")


def head_revision() -> str:
    """Return the newest revision that this autotune knows; raises ``StorageError`` where its migrations are missing."""
    folder = migrations_folder()
    _, head = _revisions(folder)
    if head is None:
        raise StorageError(f"there are no migrations in {folder}", "install autotune again with pip")
    return head


def recorded_revision(connection: Connection) -> str | None:
    """Return the revision of autotune's tables in this database; ``None`` where there are none."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def _upgrade_tables(location: Location, lock_timeout_seconds: float) -> None:
    """Create or upgrade autotune's tables to the newest revision in one transaction."""
    engine = build_engine(location, lock_timeout_seconds, foreign_keys=False)
    config = Config()
    # In Alembic's configuration a single % starts an interpolation.
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    try:
        with transaction(engine, writes=True) as connection:
            # ``env.py`` of the migrations runs them on this connection.
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        raise StorageError(
            f"{location.label} cannot be upgraded: {error}", "install autotune again with pip"
        ) from error
    finally:
        engine.dispose()
