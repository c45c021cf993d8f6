"""A PostgreSQL server as the store: set up by several at once, unreachable, refusing, restarted, read by the dashboard.

What every database must do is in the other tests of this folder, which run on both kinds.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote
from wsgiref.util import setup_testing_defaults

import click.testing
import pytest
from postgres import PASSWORD, USER, PostgresServer, end_connections
from recorded import EFFECTIVE_64, RecordedRunner
from searching import search

from autotune.cli.main import cli
from autotune.core.errors import StorageError
from autotune.core.placement import this_owner
from autotune.results.dashboard import DashboardStorage, app_over
from autotune.store.engine import (
    LOCK_TIMEOUT_SECONDS,
    build_engine,
    read_strict_json,
    storage_errors,
    transaction,
    write_strict_json,
)
from autotune.store.leases import name_of_study
from autotune.store.location import resolve_location, shown_location
from autotune.store.opening import current_revision, head_revision, open_store, upgrade
from autotune.store.repository import Store, measured_trials

HEAD = head_revision()


@pytest.fixture
def empty_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A new database without any tables."""
    database = postgres_server.new_database(is_empty=True)
    yield postgres_server.url(database)
    postgres_server.drop(database)


def test_who_only_reads_makes_no_tables(empty_url: str) -> None:
    with pytest.raises(StorageError, match="there are no studies of autotune in"):
        open_store(empty_url, create=False)
    with pytest.raises(StorageError, match="holds no studies of autotune"):
        measured_trials(empty_url, "workload", 5.0)
    assert current_revision(empty_url) == (None, HEAD)
    assert upgrade(empty_url) == (None, HEAD)
    open_store(empty_url, create=False).close()


def test_several_that_open_an_empty_database_at_once_set_it_up_once(empty_url: str) -> None:
    barrier = threading.Barrier(4)

    def work(_: int) -> str:
        barrier.wait(120)
        with open_store(empty_url) as store:
            return store.intern_workload({}, "same")

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(work, range(4)))) == 1


def test_a_newer_schema_is_refused(postgres_server: PostgresServer) -> None:
    database = postgres_server.new_database()
    postgres_server.execute("UPDATE autotune_alembic_version SET version_num = '9999'", database)
    with pytest.raises(StorageError, match="newer autotune") as caught:
        open_store(postgres_server.url(database))
    assert "another database" in caught.value.hint
    postgres_server.drop(database)


def test_what_a_server_refuses_is_said_in_plain_words_without_the_password(postgres_server: PostgresServer) -> None:
    database = postgres_server.new_database()
    there = postgres_server.url_with_password(database)
    with open_store(there) as store:
        assert store.studies() == []
    free = postgres_server.port - 1 if postgres_server.port > 1025 else postgres_server.port + 1
    cases = {
        postgres_server.url_with_password(database, "s3cret"): "refused the user or the password",
        there.replace(database, "nowhere"): "does not exist on the server",
        there.replace(f":{postgres_server.port}", f":{free}"): "no server listens there",
        there.replace("127.0.0.1", "host.invalid"): "its host is not known",
        f"postgresql+psycopg://autotune@/{database}?host=/nowhere&password=s3cret": "no server listens there",
    }
    for url, expected in cases.items():
        with pytest.raises(StorageError, match=expected) as caught:
            open_store(url)
        assert caught.value.hint
        for secret in ("s3cret", PASSWORD, quote(PASSWORD)):
            assert secret not in f"{caught.value.message} {caught.value.hint}"
    postgres_server.drop(database)


def test_a_database_in_which_no_tables_can_be_made_is_refused(postgres_server: PostgresServer) -> None:
    database = postgres_server.new_database(is_empty=True)
    user = f"limited_{database}"
    postgres_server.execute(f"CREATE ROLE {user} LOGIN")
    # Before PostgreSQL 15 everyone may.
    postgres_server.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC", database)
    url = postgres_server.url(database)
    with pytest.raises(StorageError, match="does not allow this user to do that") as caught:
        open_store(url.replace(f"//{USER}@", f"//{user}@"))
    assert "administrator" in caught.value.hint
    with (
        open_store(url) as store,
        pytest.raises(StorageError, match="can only be read: it is a standby"),
        storage_errors(store.label),
        transaction(store.engine, writes=False) as connection,
    ):
        connection.exec_driver_sql("CREATE TABLE other (name text)")
    postgres_server.drop(database)
    postgres_server.execute(f"DROP ROLE {user}")


def test_a_url_is_shown_without_its_password() -> None:
    for url in (
        "postgresql+psycopg://ada:s3cret%20pass@host/db",
        "postgresql+psycopg://ada:s3@cret@host:port/db",
        "postgres://ada@host/db?password=s3cret&sslmode=require",
    ):
        assert "s3cret" not in shown_location(url)
        assert "@cret" not in shown_location(url)
    assert "s3cret" not in resolve_location("postgres://ada:s3cret@host/db?password=s3cret").label
    with pytest.raises(StorageError, match="is not a database URL") as caught:
        resolve_location("postgresql://ada:s3@cret@host:port/db")
    assert "cret" not in caught.value.message
    assert caught.value.__cause__ is None
    assert shown_location("a:b@c.db") == "a:b@c.db"


def test_without_a_driver_the_newest_psycopg_is_meant() -> None:
    for name in ("postgres", "postgresql", "postgresql+psycopg"):
        assert resolve_location(f"{name}://host/db").url.drivername == "postgresql+psycopg"
    assert resolve_location("postgresql+psycopg2://host/db").url.drivername == "postgresql+psycopg2"


def test_documents_with_words_for_no_number_come_back() -> None:
    document = {"a": [float("inf"), {"b": -float("inf")}], "c": 1.5, "$float": "text"}
    assert read_strict_json(write_strict_json(document)) == document
    assert "Infinity" not in write_strict_json(document)


def test_connections_that_the_server_ended_are_made_anew(
    postgres_server: PostgresServer, postgres_database: str, postgres_url: str
) -> None:
    def interrupted(store: Store) -> None:
        with storage_errors(store.label), transaction(store.engine, writes=True) as connection:
            connection.exec_driver_sql("SELECT 1")
            end_connections(postgres_server, postgres_database)
            connection.exec_driver_sql("SELECT 1")

    with open_store(postgres_url) as store:
        assert store.studies() == []
        end_connections(postgres_server, postgres_database)
        # What is written at the very moment may fail.
        time.sleep(0.1)
        assert store.studies() == []
        with pytest.raises(StorageError, match=r"was shut down while it was used|closed the connection") as caught:
            interrupted(store)
        assert "autotune resume" in caught.value.hint


def test_a_single_statement_is_sent_without_a_transaction_around_it(postgres_url: str) -> None:
    """Each of BEGIN and COMMIT is a round trip; a connection that was just used is not tried before either."""
    with open_store(postgres_url) as store:
        for is_single, expected in ((True, "IDLE"), (False, "INTRANS")):
            with transaction(store.engine, writes=True, is_single=is_single) as connection:
                connection.exec_driver_sql("SELECT 1")
                driver: Any = connection.connection.dbapi_connection
                assert driver.info.transaction_status.name == expected
        with transaction(store.engine, writes=False) as connection:
            assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "repeatable read"


def test_a_lease_cannot_be_taken_over_within_a_write(postgres_url: str) -> None:
    """Whoever writes under a lease keeps it until the write has ended, though writers do not exclude each other."""
    name = name_of_study("a")
    with open_store(postgres_url) as store, open_store(postgres_url, lock_timeout_seconds=0.2) as other:
        assert store.leases.take(name, this_owner(), "one", lease_seconds=-1) is None
        store.hold("a", "one")
        with store._guarded(), pytest.raises(StorageError, match="is locked by another process"):
            other.leases.take(name, this_owner(), "two")
        assert other.leases.take(name, this_owner(), "two") is None
        with pytest.raises(StorageError, match="is no longer this search's"), store._guarded():
            pass


def test_the_dashboard_reads(postgres_url: str) -> None:
    with open_store(postgres_url) as store:
        search(store, RecordedRunner(EFFECTIVE_64))
        environment: dict[str, object] = {"PATH_INFO": "/api/studies", "HTTP_HOST": "localhost"}
        setup_testing_defaults(environment)
        statuses: list[str] = []
        app = app_over(DashboardStorage(store))
        shown = b"".join(app(environment, lambda status, *_: statuses.append(status)))  # type: ignore[arg-type]
    assert statuses == ["200 OK"]
    assert b'"bert"' in shown


def test_readers_cannot_write(postgres_url: str) -> None:
    engine = build_engine(resolve_location(postgres_url), LOCK_TIMEOUT_SECONDS)
    with pytest.raises(Exception, match="read-only"), transaction(engine, writes=False) as connection:
        connection.exec_driver_sql("DELETE FROM autotune_studies")
    engine.dispose()


def test_commands_read_from_it(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(postgres_url) as store:
        search(store, RecordedRunner(EFFECTIVE_64))
    monkeypatch.setenv("AUTOTUNE_STORAGE", postgres_url)
    runner = click.testing.CliRunner()
    for words, expected in {
        ("studies",): "bert",
        ("show", "bert"): "bert-large-uncased",
        ("export", "bert"): "per_device_train_batch_size",
        ("db", "current"): HEAD,
        ("db", "upgrade"): "as before",
    }.items():
        shown = runner.invoke(cli, list(words))
        assert shown.exit_code == 0, shown.output
        assert expected in shown.output


def test_a_command_shows_the_database_without_the_password(
    postgres_server: PostgresServer, postgres_database: str, postgres_url: str
) -> None:
    url = postgres_server.url_with_password(postgres_database)
    shown = click.testing.CliRunner().invoke(cli, ["studies", "--storage", url])
    assert f"There is no study in postgresql+psycopg://{USER}:***@127.0.0.1" in shown.stderr


@pytest.mark.service
def test_a_server_that_starts_again_is_waited_for() -> None:
    """After kill -9 it recovers; whoever writes then waits, and what was committed is there."""
    server = PostgresServer.make(durable=True)
    try:
        server.start()
        with open_store(server.url("postgres")) as store:
            kept = store.intern_workload({}, "before")
            # As a search does, which writes now and then: what is written at the very moment may fail.
            time.sleep(0.1)
            server.kill(signal.SIGKILL)
            back = threading.Timer(0.5, server.start)
            back.start()
            assert store.intern_workload({}, "before") == kept
            back.join(60)
    finally:
        server.close()
    assert not os.path.exists(server.folder)
