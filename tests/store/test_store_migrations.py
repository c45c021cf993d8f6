"""Test Alembic: scripts, declared tables and the ``alembic`` command, and failed migrations."""

import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import warm
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from checkout import ROOT
from frozen_databases import later_migration, run_sql, write_frozen

import autotune
from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import StorageError
from autotune.core.prediction import PredictionAnswer
from autotune.store.engine import build_engine, transaction
from autotune.store.location import resolve_location
from autotune.store.opening import migrations_folder, open_store
from autotune.store.records import LeftOut, StopReason, StudyRecord, TrialRecord
from autotune.store.tables import PREFIX, VERSION_TABLE, Base


@pytest.fixture
def filled(database: Path) -> Path:
    """A database with one study and one trial."""
    with open_store(str(database)) as store:
        workload = store.intern_workload({"model": "bert-tiny"}, "workload-1")
        environment = store.intern_environment({"device": "cpu"}, "environment-1")
        study = StudyRecord("kept", workload, environment, {}, {}, "0.1.0")
        store.create_study(study)
        store.start_trial(TrialRecord(study.id, 0, Candidate(Arm(), 8), workload, environment))
    return database


def content(path: Path) -> list[str]:
    """Everything in the database, as SQL."""
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def test_the_scripts_build_what_is_declared(filled: Path) -> None:
    engine = build_engine(resolve_location(str(filled)), 1.0)
    options = {
        "version_table": VERSION_TABLE,
        "compare_type": True,
        "include_name": lambda name, kind, _: kind != "table" or name.startswith(PREFIX),
    }
    try:
        with transaction(engine, writes=False) as connection:
            assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []
    finally:
        engine.dispose()


def test_a_later_migration_rebuilds_a_table_and_keeps_its_rows(filled: Path, tmp_path: Path) -> None:
    with later_migration(tmp_path / "scripts", "pass"), open_store(str(filled)) as store:
        assert len(store.trials(store.study("kept").id)) == 1
    assert run_sql(filled, "SELECT comment FROM autotune_studies") == [("kept",)]
    assert run_sql(filled, "PRAGMA foreign_key_check") == []
    references = {row[2] for row in run_sql(filled, "PRAGMA foreign_key_list(autotune_trials)")}
    assert references == {"autotune_studies", "autotune_workloads", "autotune_environments"}
    # Whoever has the older autotune is now told so.
    with pytest.raises(StorageError, match="newer autotune"):
        open_store(str(filled))


def test_a_process_killed_within_a_migration_leaves_the_database_as_it_was(filled: Path, tmp_path: Path) -> None:
    before = content(filled)
    with later_migration(tmp_path / "scripts", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
        child = multiprocessing.get_context("fork").Process(target=open_store, args=(str(filled),), daemon=True)
        child.start()
        child.join(120)
    assert child.exitcode == -9
    assert content(filled) == before
    open_store(str(filled)).close()


def test_a_new_file_is_not_left_behind_by_a_migration_that_fails(database: Path, tmp_path: Path) -> None:
    failing = later_migration(tmp_path / "scripts", "op.execute('no SQL')")
    with failing, pytest.raises(StorageError, match="syntax error"):
        open_store(str(database))
    assert list(database.parent.iterdir()) == []


def test_inspections_are_taken_out_of_the_environments(tmp_path: Path) -> None:
    path = write_frozen(tmp_path, "0001")
    environments = run_sql(path, "SELECT * FROM autotune_environments")
    inspection = ("0" * 32, "inspection:0123", '{"context_bytes":0}', "2026-11-21 09:12:13.452686")
    run_sql(path, "INSERT INTO autotune_environments VALUES (?, ?, ?, ?)", inspection)
    with open_store(str(path)) as store:
        assert store.answers.find("0123", PredictionAnswer) is None
    assert run_sql(path, "SELECT * FROM autotune_environments") == environments


def test_what_was_answered_under_the_second_revision_is_still_there(tmp_path: Path) -> None:
    path = write_frozen(tmp_path, "0002")
    with open_store(str(path)) as store:
        assert store.answers.find("prediction-1", PredictionAnswer) == PredictionAnswer((), 64)


def test_what_was_queued_under_the_third_revision_is_still_there(tmp_path: Path) -> None:
    path = write_frozen(tmp_path, "0003")
    with open_store(str(path)) as store:
        assert [(job.study, job.state) for job in store.queue.jobs()] == [("waits", "queued"), ("frozen", "finished")]
        assert "0" * 64 in store.queue.tokens_by_digest()
        waits = store.queue.jobs(states=["queued"])[0]
        assert store.queue.start(waits.id, {"host": "here"}) is not None


NOTHING = "no remaining candidate is worth a trial"


@pytest.mark.parametrize(
    ("state", "text", "reason", "sentence", "left_out"),
    [
        ("finished", f"{NOTHING}\nall fp16; tf32: never: faster\nfp32: no", StopReason.NOTHING_LEFT, NOTHING,
         (LeftOut(("all fp16", "tf32"), "never: faster"), LeftOut(("fp32",), "no"))),
        ("finished", "the budget of 3 trials is spent", StopReason.TRIALS, "the budget of 3 trials is spent", ()),
        ("finished", "the time budget of 9.0 s is spent", StopReason.TIME, "the time budget of 9.0 s is spent", ()),
        ("interrupted", "interrupted", StopReason.INTERRUPTED, "interrupted", ()),
        ("interrupted", "no server\nits log: x", StopReason.ERROR, "no server\nits log: x", ()),
        ("finished", "an older sentence", None, "an older sentence", ()),
        ("running", None, None, None, ()),
    ],
)  # fmt: skip
def test_why_a_search_ended_is_data_since_the_fourth_revision(
    tmp_path: Path, state: str, text: str | None, reason: StopReason | None, sentence: str | None, left_out: object
) -> None:
    """The lines of the text become a reason and a list, and come back as lines in a downgrade."""
    path = write_frozen(tmp_path, "0002")
    run_sql(path, "UPDATE autotune_studies SET state = ?, stopped_because = ?", (state, text))
    with open_store(str(path)) as store:
        study = store.study("bert")
        assert (study.stop_reason, study.stopped_because, study.left_out) == (reason, sentence, left_out)
    if left_out:
        run_alembic(tmp_path, path, "downgrade", "0002")
        assert run_sql(path, "SELECT stopped_because FROM autotune_studies") == [(text,)]


def run_alembic(folder: Path, database: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The ``alembic`` command in the checkout, where a folder bears the library's name."""
    settings = folder / "pyproject.toml"
    settings.write_text(f'[tool.alembic]\nscript_location = "{migrations_folder()}"\nprepend_sys_path = ["."]\n')
    return warm.run(
        [sys.executable, "-m", "alembic", "-c", str(settings), *arguments],
        cwd=ROOT,
        env=os.environ | {"AUTOTUNE_STORAGE": str(database), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.skipif(not (ROOT / "alembic" / "env.py").is_file(), reason="needs the checkout")
def test_the_alembic_command_works_in_the_checkout(filled: Path, tmp_path: Path) -> None:
    checked = run_alembic(tmp_path, filled, "check")
    assert checked.returncode == 0, checked.stderr
    assert "No new upgrade operations detected" in checked.stdout
    before = content(filled)
    stepped = run_alembic(tmp_path, filled, "downgrade", "0001")
    assert stepped.returncode == 0, stepped.stderr
    assert "autotune_answers" not in "\n".join(content(filled))
    assert run_alembic(tmp_path, filled, "upgrade", "head").returncode == 0
    # Indexes are listed in the order in which they were made.
    assert sorted(content(filled)) == sorted(before)
    downgraded = run_alembic(tmp_path, filled, "downgrade", "base")
    assert downgraded.returncode == 0, downgraded.stderr
    left = "\n".join(content(filled))
    assert "CREATE TABLE autotune_studies" not in left


def test_an_installation_finds_its_own_migrations(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    package = Path(autotune.__file__).parent
    shutil.copytree(package, site / "autotune", ignore=shutil.ignore_patterns("__pycache__", "_migrations"))
    # The library lies beside an installed package under the very name of the checkout's folder.
    (site / "alembic" / "versions").mkdir(parents=True)
    look = (
        "from autotune.store import opening; print(opening.migrations_folder()); opening.open_store('new.db').close()"
    )

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", look],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=240,
        )

    without = run()
    assert without.returncode == 1
    assert "lacks its migrations" in without.stderr
    shutil.copytree(migrations_folder(), site / "autotune" / "_migrations")
    found = run()
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(site / "autotune" / "_migrations")
    assert (tmp_path / "new.db").is_file()
