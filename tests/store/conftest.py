"""Make a real database for every test, in a SQLite file and on a PostgreSQL server, and records to put into it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from searching import write_empty_database

from autotune.core.candidate import Arm, Candidate
from autotune.store.opening import open_store
from autotune.store.records import StudyRecord, TrialRecord
from autotune.store.repository import Store


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Where the database is to be; nothing is there yet."""
    return tmp_path / "studies" / "autotune.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest) -> str:
    """Where an empty database is, as ``--storage`` names it; a test of ``store`` runs once for each kind."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("database"))
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(location: str, database: Path) -> Iterator[Store]:
    """An open, empty store."""
    if location == str(database):
        write_empty_database(database)
    with open_store(location) as opened:
        yield opened


@pytest.fixture
def new_study(store: Store) -> Callable[[str], StudyRecord]:
    """Makes and records a study of the given name."""

    def make(name: str) -> StudyRecord:
        study = StudyRecord(
            name=name,
            workload_id=store.intern_workload({"model": "bert-tiny"}, "workload-1"),
            environment_id=store.intern_environment({"device": "cpu"}, "environment-1"),
            request={"effective_batch": 64},
            ceiling={"cap_bytes": 2**34},
            autotune_version="0.1.0",
        )
        store.create_study(study)
        return study

    return make


@pytest.fixture
def new_trial(store: Store) -> Callable[[StudyRecord, int], TrialRecord]:
    """Makes and records a running trial of the study, of the given number."""

    def make(study: StudyRecord, number: int) -> TrialRecord:
        trial = TrialRecord(
            study_id=study.id,
            number=number,
            candidate=Candidate(Arm(precision="bf16"), 8 * (number + 1), 2),
            workload_id=study.workload_id,
            environment_id=study.environment_id,
        )
        store.start_trial(trial)
        return trial

    return make
