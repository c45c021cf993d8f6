"""Studies copied between databases: whole, gone on with and exported there as here, or not at all."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import click.testing
import optuna
import pytest
from postgres import sqlite_alone
from recorded import EFFECTIVE_64, RecordedRunner
from searching import interrupt_after, search
from sqlalchemy import Engine, event

from autotune.cli.main import cli
from autotune.core.errors import InvalidRequestError, StorageError, UnknownStudyError
from autotune.core.owner import this_owner
from autotune.results.report import load_report
from autotune.results.study_view import study_view
from autotune.store.leases import name_of_study
from autotune.store.opening import open_store
from autotune.store.queue import Needs
from autotune.store.records import StudyRecord, TrialRecord
from autotune.store.repository import Store
from autotune.store.transfer import copy_studies


@pytest.fixture
def target(tmp_path: Path, request: pytest.FixtureRequest, location: str) -> str:
    """Where studies are copied to: a database of the other kind. What does not depend on that is tested one way."""
    is_file = "://" not in location
    return str(request.getfixturevalue("postgres_url")) if is_file else str(tmp_path / "other.db")


@pytest.fixture
def there(target: str) -> Iterator[Store]:
    with open_store(target) as opened:
        yield opened


def trials_of_optuna(store: Store, name: str) -> list[tuple[object, ...]]:
    """All that Optuna knows of a study's trials but their number in the database."""
    study = optuna.load_study(study_name=name, storage=store.optuna)
    assert study.metric_names == ["samples/s"]
    return [
        (t.number, t.state, t.values, t.params, t.distributions, t.user_attrs, t.system_attrs, t.datetime_start)
        for t in study.trials
    ]


def test_a_finished_study_is_the_same_there(store: Store, there: Store) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    copied = copy_studies(store.url, there.url)
    study = store.existing_study("bert")
    trials = store.trials(study.id)
    assert (copied.studies, copied.trials) == (("bert",), len(trials))
    assert there.trials(study.id) == trials
    assert study_view(load_report(there, "bert")) == study_view(load_report(store, "bert"))
    assert trials_of_optuna(there, "bert") == trials_of_optuna(store, "bert")


def test_a_search_that_was_interrupted_goes_on_there_as_here(store: Store, there: Store) -> None:
    """Optuna's study is there as well, so the next proposals are the same."""
    observer, interruption = interrupt_after(3)
    begun = search(store, RecordedRunner(EFFECTIVE_64), observer, interruption)
    copy_studies(store.url, there.url, ["bert"])
    ended_there, ended_here = (search(each, RecordedRunner(EFFECTIVE_64)) for each in (there, store))
    assert [trial.candidate for trial in ended_there.trials] == [trial.candidate for trial in ended_here.trials]
    assert ended_there.trials[:3] == begun.trials
    assert ended_there.best.candidate == ended_here.best.candidate


@sqlite_alone
def test_names_that_are_taken_or_unknown_or_searched_copy_nothing(store: Store, there: Store) -> None:
    for name in ("bert", "roberta"):
        search(store, RecordedRunner(EFFECTIVE_64), study=name)
    optuna.create_study(storage=there.optuna, study_name="roberta")
    with pytest.raises(StorageError, match="has a study named 'roberta' already, so nothing was copied"):
        copy_studies(store.url, there.url)
    with pytest.raises(UnknownStudyError, match="no study 'rober'") as caught:
        copy_studies(store.url, there.url, ["rober"])
    assert "roberta" in caught.value.hint
    assert store.leases.take(name_of_study("bert"), this_owner(), "token") is None
    with pytest.raises(StorageError, match="'bert' is searched by"):
        copy_studies(store.url, there.url, ["bert"])
    store.leases.release(name_of_study("bert"), "token")
    with pytest.raises(InvalidRequestError, match="both FROM and TO"):
        copy_studies(store.url, store.url)
    assert there.studies() == []
    assert copy_studies(store.url, there.url, ["bert"]).studies == ("bert",)


@sqlite_alone
def test_a_copy_that_fails_midway_leaves_nothing(store: Store, there: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))

    def fail(*arguments: object) -> None:
        if "INSERT INTO trial_params" in str(arguments[2]):
            raise OSError(28, "No space left on device")

    from autotune.store import transfer

    def failing(location: str, **options: bool) -> Store:
        opened = open_store(location, **options)
        event.listen(opened.engine, "before_cursor_execute", fail)
        return opened

    monkeypatch.setattr(transfer, "open_store", failing)
    with pytest.raises(StorageError, match="No space left"):
        copy_studies(store.url, there.url)
    assert there.studies() == []
    assert optuna.get_all_study_names(there.optuna) == []
    with there.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM autotune_workloads").scalar() == 0
    monkeypatch.undo()
    assert copy_studies(store.url, there.url).studies == ("bert",)


@pytest.mark.parametrize("last", ["INSERT INTO trial_params", "COMMIT"])
def test_a_copy_that_is_killed_leaves_nothing(store: Store, there: Store, last: str) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))

    def copy_and_die() -> None:
        is_writing = False

        def look(*arguments: object) -> None:
            nonlocal is_writing
            is_writing |= str(arguments[2]).startswith("INSERT INTO autotune_studies")
            if str(arguments[2]).startswith(last):
                os.kill(os.getpid(), signal.SIGKILL)

        def commit(connection: object) -> None:
            if is_writing:
                os.kill(os.getpid(), signal.SIGKILL)

        event.listen(Engine, "after_cursor_execute", look)
        event.listen(Engine, "commit", commit)
        copy_studies(store.url, there.url)

    child = multiprocessing.get_context("fork").Process(target=copy_and_die)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert there.studies() == []
    assert optuna.get_all_study_names(there.optuna) == []
    assert copy_studies(store.url, there.url).studies == ("bert",)
    assert study_view(load_report(there, "bert")) == study_view(load_report(store, "bert"))


def test_what_is_written_while_a_copy_runs_is_whole_there_or_not_at_all(
    store: Store, there: Store, new_study: Callable[[str], StudyRecord], new_trial: Callable[..., TrialRecord]
) -> None:
    new_trial(new_study("before"), 0)
    is_written = False

    def write(*arguments: object) -> None:
        nonlocal is_written
        if str(arguments[2]).startswith("INSERT INTO autotune_studies") and not is_written:
            is_written = True
            new_trial(new_study("meanwhile"), 0)
            store.queue.submit("meanwhile", {}, Needs())

    event.listen(Engine, "before_cursor_execute", write)
    try:
        copied = copy_studies(store.url, there.url)
    finally:
        event.remove(Engine, "before_cursor_execute", write)
    assert (copied.studies, copied.trials, copied.jobs_left) == (("before",), 1, 0)
    assert [summary.study.name for summary in there.studies()] == ["before"]
    assert copy_studies(store.url, there.url, ["meanwhile"]).trials == 1


@sqlite_alone
def test_what_the_queue_knows_of_ended_searches_comes_along(store: Store, there: Store) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    there.queue.submit("own", {}, Needs())
    ended, _ = store.queue.submit("bert", {"model": "bert"}, Needs(), idempotency_key="key")
    assert store.queue.start(ended.id, {"host": "here"}) is not None
    store.queue.end(ended.id, 1, "finished")
    store.queue.submit("waiting", {}, Needs())
    copied = copy_studies(store.url, there.url)
    assert (copied.jobs, copied.jobs_left) == (1, 1)
    found = there.queue.job("bert")
    assert (found.id, found.state, found.number) == (ended.id, "finished", 2)
    assert there.queue.events(ended.id) == store.queue.events(ended.id)
    assert there.queue.counts() == {"queued": 1, "finished": 1}


@sqlite_alone
def test_the_command(store: Store, target: str) -> None:
    search(store, RecordedRunner(EFFECTIVE_64))
    runner = click.testing.CliRunner()
    copied = runner.invoke(cli, ["db", "copy", store.url, target, "--study", "bert"])
    assert copied.exit_code == 0, copied.output
    assert copied.stdout == "bert\n"
    assert "copied 1 study with" in copied.stderr
    again = runner.invoke(cli, ["db", "copy", store.url, target])
    assert isinstance(again.exception, StorageError)
