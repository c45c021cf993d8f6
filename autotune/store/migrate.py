"""Migrate autotune's tables with Alembic: find a database's revision, and upgrade it."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection

import autotune
from autotune.core.errors import StorageError
from autotune.store.engine import build_engine, transaction
from autotune.store.location import Location
from autotune.store.tables import VERSION_TABLE


def migrations_folder() -> Path:
    """Return Alembic's folder: ``autotune/_migrations`` when installed, ``alembic`` in a checkout."""
    package = Path(autotune.__file__).resolve().parent
    for folder in (package / "_migrations", package.parent / "alembic"):
        # Alembic itself may be installed beside the package, but that folder has no env.py.
        if (folder / "env.py").is_file() and (folder / "versions").is_dir():
            return folder
    raise StorageError(f"this installation of autotune at {package} lacks its migrations", "install it again with pip")


def alembic_config(folder: Path, connection: Connection | None = None) -> Config:
    """Return Alembic's configuration without a file; ``env.py`` uses the connection if there is one."""
    config = Config()
    # A % would start an interpolation.
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    if connection is not None:
        config.attributes["connection"] = connection
    return config


def head_revision(folder: Path) -> str:
    """Return the newest revision in the folder."""
    head = ScriptDirectory.from_config(alembic_config(folder)).get_current_head()
    if head is None:
        raise StorageError(f"there are no migrations in {folder}", "install autotune again with pip")
    return head


def recorded_revision(connection: Connection) -> str | None:
    """Return the revision of autotune's tables in this database; ``None`` where there are none."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def check_revision_is_known(connection: Connection, folder: Path, location: Location) -> bool:
    """Return whether the database has the newest revision.

    Raises ``StorageError`` where it has a revision that this autotune has no script for.
    """
    revision = recorded_revision(connection)
    scripts = ScriptDirectory.from_config(alembic_config(folder))
    if revision is not None and revision not in {script.revision for script in scripts.walk_revisions()}:
        raise StorageError(
            f"{location.label} was written by a newer autotune (revision {revision}, this one knows "
            f"{scripts.get_current_head()})",
            f"upgrade autotune, or {location.another}",
        )
    return revision is not None and revision == scripts.get_current_head()


def upgrade_tables(location: Location, lock_timeout_seconds: float, folder: Path) -> None:
    """Upgrade autotune's tables to the newest revision in one transaction; write nothing where they have it."""
    engine = build_engine(location, lock_timeout_seconds, foreign_keys=False)
    try:
        with transaction(engine, writes=False) as connection:
            if recorded_revision(connection) == head_revision(folder):
                return
        with transaction(engine, writes=True) as connection:
            command.upgrade(alembic_config(folder, connection), "head")
    except CommandError as error:
        raise StorageError(
            f"{location.label} cannot be upgraded: {error}", "install autotune again with pip"
        ) from error
    finally:
        engine.dispose()
