"""Run a PostgreSQL server for the tests: one for all processes of a run, with a database for each of them.

The server's programs are those of the system or of the package ``pgserver``. They refuse to run as root, so root runs
them as another user. The server listens on a socket, where it trusts everyone, and on a port, where it asks for the
password. It is not tuned to keep data through a power failure.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import itertools
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sqlite_alone = pytest.mark.parametrize("location", ["sqlite"], indirect=True)
"""For a test of ``store`` that looks into the file."""

USER = "autotune"
PASSWORD = "correct horse"
_TEMPLATE = "autotune_template"
# A busy machine takes seconds to start a server; none takes minutes.
_START_SECONDS = 60.0
# Settings of a server whose data may be lost: no waiting for the disk.
_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "max_wal_size": "2GB",
    "log_min_messages": "warning",
}


_EMPTY = """
DO $$
DECLARE name text;
BEGIN
    PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid();
    SET LOCAL session_replication_role = replica;
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
        AND tablename NOT IN ('alembic_version', 'version_info', 'autotune_alembic_version')
    LOOP EXECUTE format('DELETE FROM %I', name); END LOOP;
    FOR name IN SELECT sequencename FROM pg_sequences LOOP PERFORM setval(name::regclass, 1, false); END LOOP;
END $$
"""


class NoPostgresError(Exception):
    """Why no server can run here."""


def find_programs() -> Path:
    """Return the folder with the server's programs; raises ``NoPostgresError`` where there is none."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if (found := shutil.which("postgres")) is not None:
        folders.insert(0, Path(found).resolve().parent)
    package = importlib.util.find_spec("pgserver")
    if package is not None and package.origin is not None:
        folders.append(Path(package.origin).parent / "pginstall" / "bin")
    for folder in folders:
        if (folder / "initdb").is_file() and (folder / "postgres").is_file():
            return folder
    raise NoPostgresError("no PostgreSQL server is installed: neither postgresql of the system nor pip's pgserver")


def _other_user() -> dict[str, Any]:
    """Return the arguments of ``subprocess`` with which root runs the server as another user."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise NoPostgresError("PostgreSQL refuses to run as root, and there is no user postgres or nobody")


def _end_with_parent() -> None:
    """Have the kernel end the server with the process that started it, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


@dataclass
class PostgresServer:
    """A server and its data; ``start`` and ``kill`` may be called again and again."""

    folder: Path
    port: int
    programs: Path
    durable: bool = False
    """Whether it waits for the disk, as it must where it is killed together with its machine."""
    process: subprocess.Popen[bytes] | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def make(cls, *, durable: bool = False) -> PostgresServer:
        """Make the data of a new server, which is not started yet."""
        programs = find_programs()
        user = _other_user()
        # A socket's path is short, which a test's own folder is not.
        folder = Path(tempfile.mkdtemp(prefix="autotune-pg-"))
        if user:
            os.chown(folder, user["user"], user["group"])
        # Others of this machine connect through the socket in it.
        folder.chmod(0o755)
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        words = ["initdb", "--pgdata", str(folder / "data"), "--username", USER, "--pwfile", str(folder / "password")]
        words += ["--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
        try:
            subprocess.run(
                [programs / words[0], *words[1:]], cwd=folder, capture_output=True, text=True, timeout=120, check=True,
                **user,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            said = getattr(error, "stderr", None) or str(error)
            raise NoPostgresError(f"initdb of {programs} failed: {said.strip()[-300:]}") from error
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return cls(folder, port, programs, durable)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {} if self.durable else _SETTINGS
        words = [str(self.programs / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)]
        words += ["-k", str(self.folder), "-h", "127.0.0.1"]
        for name, value in {"max_connections": "200", **settings}.items():
            words += ["-c", f"{name}={value}"]
        import psycopg

        deadline = time.monotonic() + _START_SECONDS
        while True:
            # A server refuses to start as long as processes of a killed one are left.
            if self.process is None or self.process.poll() is not None:
                try:
                    self.process = self._launch(words)
                except OSError as error:
                    raise NoPostgresError(f"{words[0]} cannot be started: {error}") from error
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline:
                    raise NoPostgresError(f"the server did not start: {error}\n{self.log()[-500:]}") from error
                time.sleep(0.05)

    def _launch(self, words: list[str]) -> subprocess.Popen[bytes]:
        # The kernel would end it with the thread that started it.
        is_main = threading.current_thread() is threading.main_thread()
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                words,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent if is_main else None,
                **_other_user(),
            )

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the server at once; its other processes notice that the first has gone."""
        if self.process is None:
            return
        self.process.send_signal(number)
        self.process.wait(120)
        self.process = None

    def close(self) -> None:
        """End it, and remove its data."""
        self.kill(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """Return what the server has written."""
        return (self.folder / "log").read_text(errors="replace")

    def dsn(self, database: str) -> str:
        """Return how psycopg connects to a database through the socket."""
        return f"postgresql://{USER}@/{database}?host={self.folder}&port={self.port}"

    def url(self, database: str) -> str:
        """Return the URL of a database for ``--storage``, through the socket."""
        return self.dsn(database).replace("postgresql://", "postgresql+psycopg://")

    def url_with_password(self, database: str, password: str = PASSWORD) -> str:
        """Return the URL of a database through the port, where the password counts."""
        return f"postgresql+psycopg://{USER}:{password.replace(' ', '%20')}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run one statement in a transaction of its own."""
        import psycopg

        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def new_database(self, *, is_empty: bool = False) -> str:
        """Make a database, with all tables or without any, and return its name."""
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}" + ("" if is_empty else f" TEMPLATE {_TEMPLATE}"))
        return name

    def drop(self, database: str) -> None:
        """Remove a database, also where somebody is still connected."""
        self.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def empty(self, database: str) -> None:
        """Remove every row, as from a new database, which would take longer to make."""
        self.execute(_EMPTY, database)

    def make_template(self) -> None:
        """Make the database with all tables that others are copied from."""
        from autotune.store.opening import open_store

        self.execute(f"CREATE DATABASE {_TEMPLATE}")
        open_store(self.url(_TEMPLATE)).close()


@contextmanager
def shared_server(folder: Path) -> Iterator[PostgresServer]:
    """Yield the server that all test processes with this folder share; the first starts it, and ends it last."""
    with open(folder / "postgres.lock", "a+") as lock, open(folder / "postgres.users", "a") as users:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        about = folder / "postgres.json"
        own = None
        if about.exists():
            told = json.loads(about.read_text())
            if "problem" in told:
                raise NoPostgresError(told["problem"])
            server = PostgresServer(Path(told["folder"]), told["port"], Path(told["programs"]))
        else:
            try:
                server = own = PostgresServer.make()
                server.start()
                server.make_template()
            except NoPostgresError as error:
                about.write_text(json.dumps({"problem": str(error)}))
                if own is not None:
                    own.close()
                raise
            told = {"folder": str(server.folder), "port": server.port, "programs": str(server.programs)}
            about.write_text(json.dumps(told))
        fcntl.flock(lock, fcntl.LOCK_UN)
        try:
            yield server
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            if own is not None:
                _wait_for_others(users.fileno())
                about.unlink(missing_ok=True)
                own.close()


def _wait_for_others(users: int) -> None:
    """Wait until no other test process uses the server, nearly as long as a test may take."""
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.1)


def end_connections(server: PostgresServer, database: str) -> None:
    """Have the server end every other connection to a database, as an administrator can."""
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND datname = current_database()",
        database,
    )
