"""Test opening every kind of file as a database."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import optuna
import pytest
from frozen_databases import run_sql
from messages import check_refusals
from processes import receive

from autotune.core.errors import StorageError
from autotune.store.engine import build_engine, choose_journal
from autotune.store.location import resolve_location
from autotune.store.opening import current_revision, head_revision, open_store, upgrade

HEAD = head_revision()


def tables(path: Path) -> set[str]:
    return {str(name) for (name,) in run_sql(path, "SELECT name FROM sqlite_master WHERE type = 'table'")}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def plain_optuna(tmp_path: Path) -> Path:
    """A file that Optuna alone made, with a study and a trial in it."""
    path = tmp_path / "optuna.db"
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    study = optuna.create_study(storage=storage, study_name="older")
    study.tell(study.ask(), 1.5)
    storage.remove_session()
    storage.engine.dispose()
    return path


def test_a_missing_file_is_made_with_its_folders_and_tables(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "autotune.db"
    with open_store(str(path)) as store:
        assert store.path == path
        assert store.label == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "others of this machine cannot read it"
    assert {"autotune_studies", "autotune_trials"} <= tables(path)
    assert all(name.startswith("autotune_") for name in tables(path))
    assert run_sql(path, "SELECT version_num FROM autotune_alembic_version") == [(HEAD,)]
    assert run_sql(path, "PRAGMA journal_mode") == [("wal",)]
    assert [file.name for file in path.parent.iterdir()] == ["autotune.db"]


def test_a_missing_file_is_not_made_for_those_who_only_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "autotune.db"
    for read in (lambda: open_store(str(path), create=False), lambda: current_revision(str(path))):
        with pytest.raises(StorageError, match="there is no database at"):
            read()
    assert not path.parent.exists()


def test_opening_again_changes_nothing(database: Path) -> None:
    open_store(str(database)).close()
    before = digest(database)
    open_store(str(database), create=False).close()
    open_store(str(database)).close()
    assert digest(database) == before


def test_an_empty_file_is_filled(database: Path) -> None:
    database.parent.mkdir()
    database.touch()
    open_store(str(database), create=False).close()
    assert current_revision(str(database)) == (HEAD, HEAD)


def test_a_file_of_plain_optuna_gains_our_tables_and_keeps_its_own(plain_optuna: Path) -> None:
    assert current_revision(str(plain_optuna)) == (None, HEAD)
    assert upgrade(str(plain_optuna)) == (None, HEAD)
    assert upgrade(str(plain_optuna)) == (HEAD, HEAD)
    with open_store(str(plain_optuna)) as store:
        assert store.studies() == []
    assert optuna.load_study(study_name="older", storage=f"sqlite:///{plain_optuna}").best_value == 1.5


def make_ours(path: Path, sql: str | None = None) -> None:
    """Make a database of ours, changed by a statement, or else without its end."""
    open_store(str(path)).close()
    if sql is None:
        os.truncate(path, 4096)
    else:
        run_sql(path, sql)


NEWER = "UPDATE autotune_alembic_version SET version_num = '9999'"


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda path: path.write_text("these are notes\n" * 100), "is not a SQLite database", "--storage"),
        (lambda path: path.write_bytes(b"SQLite"), "is not a SQLite database", "--storage"),
        # Noise after the header.
        (
            lambda path: path.write_bytes(b"SQLite format 3\x00" + bytes(range(256)) * 40),
            "is not a SQLite database",
            "--storage",
        ),
        (make_ours, "is damaged", "restore it from a copy"),
        (
            lambda path: run_sql(path, "CREATE TABLE bookmarks (url TEXT)"),
            "another program's database .*bookmarks",
            "--storage",
        ),
        (lambda path: make_ours(path, NEWER), f"newer autotune .*9999.*{HEAD}", "upgrade autotune"),
    ],
)
def test_a_file_we_cannot_use_is_refused_and_left_as_it_was(
    tmp_path: Path, make: Callable[[Path], object], message: str, hint: str
) -> None:
    path = tmp_path / "file.db"
    make(path)
    before = digest(path)
    for create in (True, False):
        with pytest.raises(StorageError, match=message) as caught:
            open_store(str(path), create=create)
        assert str(path) in caught.value.message
        assert hint in caught.value.hint
        assert "\n" not in str(caught.value)
    assert digest(path) == before


def test_the_refused_revision_can_still_be_shown(database: Path) -> None:
    database.parent.mkdir()
    make_ours(database, NEWER)
    assert current_revision(str(database)) == ("9999", HEAD)


@pytest.mark.skipif(not Path("/proc/locks").is_file(), reason="needs /proc/locks")
def test_opening_a_file_twice_in_one_process_keeps_its_locks(database: Path) -> None:
    """The system drops a process's locks on a file when it closes any descriptor of it."""
    with open_store(str(database)) as first:
        first.intern_workload({}, "first")
        locks = Path("/proc/locks").read_text().count(f":{database.stat().st_ino} ")
        assert locks > 0
        current_revision(str(database))
        open_store(str(database)).close()
        assert Path("/proc/locks").read_text().count(f":{database.stat().st_ino} ") == locks
        first.intern_workload({}, "second")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_a_folder_that_cannot_be_written_is_refused() -> None:
    # Not even the superuser can make a file there.
    with pytest.raises(StorageError, match="cannot be opened"):
        open_store("/proc/autotune.db")


def test_messages_of_refused_files(tmp_path: Path, plain_optuna: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    names = (".", "file/autotune.db", "file/deeper/autotune.db", plain_optuna.name)
    with closing(sqlite3.connect(plain_optuna, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        calls = {name: partial(open_store, str(tmp_path / name), lock_timeout_seconds=0.1) for name in names}
        check_refusals("refused-files", calls, tmp_path)


def test_a_file_locked_for_writing_opens_but_refuses_to_write(database: Path) -> None:
    open_store(str(database)).close()
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with open_store(str(database), lock_timeout_seconds=0.1) as store:
            assert store.studies() == []
            with pytest.raises(StorageError, match="locked by another process"):
                store.intern_workload({}, "fingerprint")
            other.execute("ROLLBACK")
            store.intern_workload({}, "fingerprint")


def test_wal_is_taken_back_where_machines_share_the_file(database: Path) -> None:
    open_store(str(database)).close()
    engine = build_engine(resolve_location(str(database)), 1.0)
    try:
        assert choose_journal(engine, shared_file_system=True) == "delete"
        assert run_sql(database, "PRAGMA journal_mode") == [("delete",)]
        assert choose_journal(engine, shared_file_system=False) == "wal"
    finally:
        engine.dispose()


def test_a_file_that_is_being_read_keeps_its_journal_for_now(plain_optuna: Path) -> None:
    upgrade(str(plain_optuna))
    with closing(sqlite3.connect(plain_optuna, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("BEGIN")
        other.execute("SELECT * FROM studies").fetchall()
        with open_store(str(plain_optuna), lock_timeout_seconds=0.1) as store:
            assert store.studies() == []
        assert run_sql(plain_optuna, "PRAGMA journal_mode") == [("delete",)]
    open_store(str(plain_optuna)).close()
    assert run_sql(plain_optuna, "PRAGMA journal_mode") == [("wal",)]


def _open_with_little_room(path: str, answer: multiprocessing.SimpleQueue[str]) -> None:
    """In a process of its own: no file may grow beyond 24 KiB, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 1024, 24 * 1024))
    try:
        open_store(path)
        answer.put("opened")
    except StorageError as error:
        answer.put(f"{type(error).__name__}: {error}")


def test_nothing_half_written_is_left_when_the_disk_is_full(database: Path) -> None:
    forks = multiprocessing.get_context("fork")
    answer: multiprocessing.SimpleQueue[str] = forks.SimpleQueue()
    child = forks.Process(target=_open_with_little_room, args=(str(database), answer), daemon=True)
    child.start()
    child.join(120)
    assert receive(answer).startswith("StorageError: ")
    assert list(database.parent.iterdir()) == []
    open_store(str(database)).close()
