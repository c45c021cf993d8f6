"""Connect to PostgreSQL: pool, time limits, a server that restarts, the lock of migrations, errors in plain words."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event, text

from autotune.store.location import Location

CONNECT_SECONDS = 10
"""How long a host that does not answer is waited for. A choice: a server of the same site answers in milliseconds."""
RESTART_SECONDS = 15.0
"""How long a server that was there is waited for when it is gone. Recovery after kill -9 took a second in the tests."""
_POLL_SECONDS = 0.25
# A server that vanished without a word, as behind a cut network, is given up after a minute; by default Linux waits for
# two hours. Choices: shorter than two leases of a study.
_LOST_PEER = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
# "autotune" as a number: whoever changes the tables holds the advisory lock of this number.
_MIGRATION_LOCK = int.from_bytes(b"autotune")

_ANOTHER = "choose another database with --storage"
_START = "start the server, correct the host and the port in the URL, or " + _ANOTHER
_RESUME = "once the server is back, autotune resume goes on with a search that was under way"
_RIGHTS = "ask the server's administrator to grant it"
# Codes of errors (https://www.postgresql.org/docs/current/errcodes-appendix.html), the longest that matches first.
_BY_CODE: dict[str, tuple[str, str]] = {
    "28": ("refused the user or the password", f"correct them in the URL, in ~/.pgpass or PGPASSWORD, or {_ANOTHER}"),
    "3D000": ("does not exist on the server", f"create it with createdb, or {_ANOTHER}"),
    "53300": ("has no connection left", "wait until others have ended, or raise the server's max_connections"),
    "53100": ("cannot grow: the server's disk is full", f"make room, or {_ANOTHER}"),
    "57": ("was shut down while it was used", _RESUME),
    "08": ("closed the connection", _RESUME),
    "55P03": ("is locked by another process", f"wait until that process has ended, or {_ANOTHER}"),
    "40P01": ("is locked by another process", "run the command again"),
    "40001": ("was changed by another process at the same moment", "run the command again"),
    "42501": ("does not allow this user to do that", _RIGHTS),
    "25006": ("can only be read: it is a standby, or set to read-only", f"name the primary server, or {_ANOTHER}"),
    "42P01": ("holds no studies of autotune", "run a search first, or name the database of one with --storage"),
    "22001": ("has no room for so long a text", "shorten names and paths"),
    "XX001": ("is damaged", f"restore it from a backup, or {_ANOTHER}"),
    "XX002": ("is damaged", f"restore it from a backup, or {_ANOTHER}"),
}
# libpq gives no code for errors of connecting, only text, in English unless the server was told another language. What
# is not found here is shown as it is.
_BY_TEXT: tuple[tuple[str, str, str], ...] = (
    ("password authentication failed", *_BY_CODE["28"]),
    ("no password supplied", "asks for a password", f"put it into ~/.pgpass, PGPASSWORD or the URL, or {_ANOTHER}"),
    ("authentication failed", *_BY_CODE["28"]),
    ("no pg_hba.conf entry", "refused this user from this host", f"add it to the server's pg_hba.conf, or {_ANOTHER}"),
    ('role "', *_BY_CODE["28"]),
    ('database "', *_BY_CODE["3D000"]),
    ("too many clients", *_BY_CODE["53300"]),
    ("connection slots", *_BY_CODE["53300"]),
    ("starting up", "is starting up", "wait a moment, and run the command again"),
    ("recovery mode", "is starting up", "wait a moment, and run the command again"),
    ("not yet accepting", "is starting up", "wait a moment, and run the command again"),
    ("shutting down", "is shutting down", _RESUME),
    ("server closed the connection", *_BY_CODE["08"]),
    ("connection is lost", *_BY_CODE["08"]),
    ("terminating connection", *_BY_CODE["08"]),
    ("Connection refused", "cannot be reached: no server listens there", _START),
    ("No such file or directory", "cannot be reached: no server listens there", _START),
    ("Name or service not known", "cannot be reached: its host is not known", _START),
    ("failed to resolve host", "cannot be reached: its host is not known", _START),
    ("could not translate host name", "cannot be reached: its host is not known", _START),
    ("timeout expired", f"did not answer within {CONNECT_SECONDS} seconds", _START),
    ("timed out", f"did not answer within {CONNECT_SECONDS} seconds", _START),
    ("cannot contain NUL", "has no room for a text with a zero byte", "leave the zero byte out"),
    ("SSL", "cannot be reached through TLS", "correct sslmode and the certificates in the URL"),
)
# A server that restarts says one of these.
_IN_PASSING = (
    "server closed the connection",
    "Connection refused",
    "No such file or directory",
    "starting up",
    "shutting down",
    "recovery mode",
    "not yet accepting",
)


def pool(location: Location, size: int) -> dict[str, Any]:
    """Return the arguments of ``create_engine`` for a PostgreSQL database.

    Connections are tested before each use, since a restarted server has closed them.
    """
    own: dict[str, str | int] = {"connect_timeout": CONNECT_SECONDS, "application_name": "autotune", **_LOST_PEER}
    return {
        "pool_pre_ping": True,
        "pool_size": size,
        "max_overflow": 0,
        # What is idle is closed by whoever stands between, such as a firewall.
        "pool_recycle": 1800,
        "pool_use_lifo": True,
        "connect_args": {name: value for name, value in own.items() if name not in location.url.query},
    }


def prepare_connections(engine: Engine, lock_timeout_seconds: float) -> None:
    """Set the lock timeout of each connection, and wait for a restarting server."""

    @event.listens_for(engine, "connect")
    def limit(dbapi_connection: Any, _record: Any) -> None:
        with dbapi_connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {int(1000 * lock_timeout_seconds)}")
        dbapi_connection.commit()

    wait_for_restarts(engine)


def wait_for_restarts(engine: Engine) -> None:
    """Make an engine wait for a restarting server. A server that was never reached is an error at once."""
    was_there = False

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, _record: Any, positional: Any, named: Any) -> Any:
        nonlocal was_there
        deadline = time.monotonic() + RESTART_SECONDS
        while True:
            try:
                made = dialect.connect(*positional, **named)
            except dialect.loaded_dbapi.OperationalError as error:
                passes = was_there and any(words in str(error) for words in _IN_PASSING)
                if not passes or time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
            else:
                was_there = True
                return made


@contextmanager
def migration_lock(engine: Engine) -> Iterator[None]:
    """Let one process at a time migrate the tables; does nothing for a SQLite file.

    The lock belongs to a transaction of its own, and ends with it, however that ends.
    """
    if engine.dialect.name != "postgresql":
        yield
        return
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _MIGRATION_LOCK})
        yield


def describe_error(error: BaseException) -> tuple[str, str] | None:
    """Return the meaning of a PostgreSQL error and a hint; ``None`` for any other error."""
    if not isinstance(error, driver_errors()):
        return None
    code: str = getattr(error, "sqlstate", None) or ""
    matching = [known for known in _BY_CODE if code.startswith(known)]
    if matching:
        return _BY_CODE[max(matching, key=len)]
    said = str(error)
    for words, message, hint in _BY_TEXT:
        if not code and words in said:
            return message, hint
    lines = said.splitlines() or [type(error).__name__]
    return f"failed: {lines[0]}", f"see that the server works, or {_ANOTHER}"


def driver_errors() -> tuple[type[Exception], ...]:
    """Return psycopg's error class; an empty tuple while psycopg is not imported."""
    module = sys.modules.get("psycopg")
    return (module.Error,) if module is not None else ()
