"""Databases of earlier autotunes, each with a search that was killed during its fourth trial, are gone on with."""

import os
from pathlib import Path

import pytest
from frozen_databases import REVISIONS, later_migration, run_sql, write_frozen
from recorded import EFFECTIVE_64, RecordedRunner
from searching import prepared, search, with_environment

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import InvalidRequestError
from autotune.core.outcome import Failed
from autotune.results.json_document import report_document
from autotune.results.report import load_report
from autotune.results.text import summary_lines
from autotune.store.opening import current_revision, migrations_folder, open_store
from autotune.tuning.environment import measured_variables


@pytest.fixture(autouse=True)
def _as_it_was_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that torch reads was set where they were written, and trials measured as they did then."""
    for name in measured_variables(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setattr("autotune.tuning.prepare._measurement_revision", lambda request: 1)


@pytest.fixture(params=REVISIONS)
def frozen(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_frozen(tmp_path, request.param)


def go_on(path: Path) -> None:
    """The same search again ends as one that was never killed; nothing that was recorded is lost or run again."""
    with open_store(str(path)) as store:
        study = store.study("bert")
        before = store.trials(study.id)
        assert [trial.state for trial in before] == ["completed", "completed", "out_of_memory", "running"]
        runner, given = RecordedRunner(EFFECTIVE_64), prepared()
        # They were written on another host.
        written = store.environment(study.environment_id)
        run = search(store, runner, given=with_environment(given, host=written.get("host", given.environment["host"])))
        assert run.study.state == "finished"
        assert run.best.candidate == Candidate(Arm("bf16"), 32, 2)
        assert run.trials[:3] == before[:3]
        assert isinstance(run.trials[3].outcome, Failed)
        assert runner.candidates.count(before[3].candidate) == 1
        assert not {trial.candidate for trial in before[:3]} & set(runner.candidates)
        report = load_report(store, "bert")
        assert report_document(report)["best"]["precision"] == "bf16"
        assert summary_lines(report)
    assert len(set(current_revision(str(path)))) == 1


def test_there_is_one_of_each_revision() -> None:
    revisions = [path.name.partition("_")[0] for path in (migrations_folder() / "versions").glob("*.py")]
    assert sorted(revisions) == REVISIONS


# Each is gone on with after a migration that failed, too.
@pytest.mark.whole
def test_an_old_search_is_gone_on_with(frozen: Path) -> None:
    go_on(frozen)


def test_an_old_search_whose_trials_measured_otherwise_is_not(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.tuning.prepare._measurement_revision", lambda request: 99)
    with open_store(str(frozen)) as store, pytest.raises(InvalidRequestError) as refused:
        search(store, RecordedRunner(EFFECTIVE_64))
    assert "another version of autotune, whose trials differ: measurement revision 1, now 99" in refused.value.message
    assert "--study" in refused.value.hint


@pytest.mark.parametrize("journal", ["delete", pytest.param("wal", marks=pytest.mark.whole)])
def test_a_migration_that_fails_leaves_every_byte_and_the_search_can_be_gone_on_with(
    frozen: Path, tmp_path: Path, journal: str
) -> None:
    run_sql(frozen, f"PRAGMA journal_mode={journal}")
    before = frozen.read_bytes()
    failing = later_migration(tmp_path / "scripts", 'op.execute("INSERT INTO autotune_nowhere VALUES (1)")')
    with failing, pytest.raises(Exception, match="autotune_nowhere"):
        open_store(str(frozen))
    assert frozen.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("frozen")] == ["frozen.db"]
    go_on(frozen)
