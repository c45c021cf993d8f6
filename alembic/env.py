"""Alembic's environment: it migrates autotune's own tables and leaves Optuna's alone.

autotune hands over an open connection. Run by the ``alembic`` command, it works on the database
that ``AUTOTUNE_STORAGE`` names, else on ``studies/autotune.db``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from alembic import context
from sqlalchemy import Connection

from autotune.store.engine import LOCK_TIMEOUT_SECONDS, build_engine, migration_lock, transaction
from autotune.store.location import DEFAULT_LOCATION, LOCATION_VARIABLE, resolve_location
from autotune.store.tables import PREFIX, VERSION_TABLE, Base


def include_name(name: str | None, kind: str, _parents: Mapping[str, str | None]) -> bool:
    """Only tables of our own are compared with the declared ones."""
    return kind != "table" or (name is not None and name.startswith(PREFIX))


def migrate(connection: Connection) -> None:
    """Runs the scripts within the connection's transaction."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        include_name=include_name,
        # SQLite changes a table by making it anew.
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def main() -> None:
    """With the connection that autotune gave, or one of our own."""
    if context.is_offline_mode():
        raise SystemExit("migrations run against a database, not as SQL text: leave out --sql")
    connection = context.config.attributes.get("connection")
    if connection is not None:
        migrate(connection)
        return
    location = resolve_location(os.environ.get(LOCATION_VARIABLE) or DEFAULT_LOCATION)
    engine = build_engine(location, LOCK_TIMEOUT_SECONDS, foreign_keys=False)
    try:
        with migration_lock(engine), transaction(engine, writes=True) as own_connection:
            migrate(own_connection)
    finally:
        engine.dispose()


main()
