"""Open Optuna's storage in the same database, and check the version of its tables."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import optuna
from optuna.storages import RDBStorage
from sqlalchemy import event

from autotune.core.errors import StorageError
from autotune.store import postgres
from autotune.store.location import Location

# Optuna's own connections of one process: a search needs one, the dashboard one for each request.
_POOL_SIZE = 10
# A database has these tables exactly when Optuna finished setting it up; alembic_version is created last.
_SIGNS_OF_OPTUNA = frozenset({"studies", "trials", "version_info", "alembic_version"})


def optuna_arguments(location: Location, lock_timeout_seconds: float) -> dict[str, Any]:
    """Return the arguments of ``RDBStorage`` for this database: ``url`` and ``engine_kwargs``."""
    # Optuna passes the URL through str.format.
    url = location.url_text.replace("{", "{{").replace("}", "}}")
    if location.is_postgres:
        return {"url": url, "engine_kwargs": postgres.pool(location, _POOL_SIZE)}
    is_file = location.path is not None
    return {"url": url, "engine_kwargs": {"connect_args": {"timeout": lock_timeout_seconds}} if is_file else {}}


def has_optuna(table_names: Collection[str]) -> bool:
    """Return whether Optuna's tables are among these."""
    return set(table_names) >= _SIGNS_OF_OPTUNA


# The version of the tables that this Optuna works with.
_head_version: str | None = None


def open_existing_optuna(location: Location, lock_timeout_seconds: float) -> RDBStorage:
    """Open Optuna's storage over existing tables; writes nothing.

    Raises ``StorageError`` where their version is not the one that this Optuna needs.
    """
    storage = RDBStorage(
        **optuna_arguments(location, lock_timeout_seconds),
        skip_compatibility_check=True,
        skip_table_creation=True,
    )
    global _head_version
    if _head_version is None:
        # Asked once, since it imports all of Optuna's migrations.
        _head_version = storage.get_head_version()
    found, needed = storage.get_current_version(), _head_version
    if found == needed:
        if location.is_postgres:
            postgres.wait_for_restarts(storage.engine)
        return storage
    older = found in storage.get_all_versions()
    close_optuna(storage)
    if older:
        raise StorageError(
            f"{location.label} was written by an older Optuna (tables {found}, Optuna {optuna.__version__} "
            f"needs {needed})",
            f"upgrade them with `optuna storage upgrade --storage '{location.url.render_as_string()}'`",
        )
    raise StorageError(
        f"{location.label} was written by a newer Optuna (tables {found}, Optuna {optuna.__version__} knows {needed})",
        f"upgrade Optuna, or {location.another}",
    )


def create_optuna(location: Location, lock_timeout_seconds: float) -> RDBStorage:
    """Open Optuna's storage, and create its tables where they are missing."""
    try:
        storage = RDBStorage(**optuna_arguments(location, lock_timeout_seconds))
        if location.is_postgres:
            postgres.wait_for_restarts(storage.engine)
        return storage
    except RuntimeError as error:
        raise StorageError(
            f"{location.label} holds tables that Optuna {optuna.__version__} cannot use",
            f"upgrade them with `optuna storage upgrade --storage '{location.url.render_as_string()}'`",
        ) from error


def relax_optuna(storage: RDBStorage) -> None:
    """Let Optuna commit without waiting for the disk, which it would do a dozen times a trial.

    Only used in WAL mode, where that cannot damage the file. autotune's own commits do wait, and include what Optuna
    wrote before. So even a power failure loses no more than the running trial.
    """

    _at_each_connection(storage, "PRAGMA synchronous=NORMAL")


def refuse_writes(storage: RDBStorage) -> None:
    """Make SQLite or PostgreSQL refuse every change through this storage; does nothing for other databases."""
    if storage.engine.dialect.name == "sqlite":
        _at_each_connection(storage, "PRAGMA query_only=ON")
    if storage.engine.dialect.name == "postgresql":
        postgres.refuse_writes(storage.engine)
        # Existing connections do not have the setting.
        close_optuna(storage)


def _at_each_connection(storage: RDBStorage, pragma: str) -> None:
    @event.listens_for(storage.engine, "connect")
    def prepare(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.execute(pragma)

    # Existing connections do not have the setting.
    close_optuna(storage)


def close_optuna(storage: RDBStorage) -> None:
    """Close Optuna's connections to the file; new ones are opened if it is used again."""
    storage.remove_session()
    storage.engine.dispose()
