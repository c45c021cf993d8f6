"""Test several processes and threads with one file, some of them killed."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import optuna
import pytest
from processes import receive, wait_until
from sqlalchemy import event

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import AutotuneError
from autotune.core.outcome import OutOfMemory
from autotune.store.opening import open_store
from autotune.store.records import StudyRecord, TrialRecord
from autotune.store.repository import Store

NewStudy = Callable[[str], StudyRecord]
NewTrial = Callable[[StudyRecord, int], TrialRecord]

Answers = SimpleQueue[str]

forks = multiprocessing.get_context("fork")


def answers_of_processes(count: int, work: Callable[[str, Barrier, Answers], None], database: Path) -> list[str]:
    """Have so many processes do the same work, which waits for all of them; what each answers."""
    answers: Answers = forks.SimpleQueue()
    start = forks.Barrier(count)
    children = [forks.Process(target=work, args=(str(database), start, answers), daemon=True) for _ in range(count)]
    for child in children:
        child.start()
    found = [receive(answers) for _ in children]
    for child in children:
        child.join(120)
    return found


def open_and_intern(path: str, start: Barrier, answers: Answers) -> None:
    start.wait(60)
    try:
        with open_store(path) as store:
            answers.put(store.intern_workload({}, "same"))
    except AutotuneError as error:
        answers.put(f"failed: {error}")


def test_processes_that_make_the_same_file_at_once_share_it(database: Path) -> None:
    ids = set(answers_of_processes(5, open_and_intern, database))
    assert len(ids) == 1, ids
    assert not ids.pop().startswith("failed")
    assert [file.name for file in database.parent.iterdir()] == ["autotune.db"]


def intern_many(path: str, start: Barrier, answers: Answers) -> None:
    try:
        with open_store(path) as store:
            start.wait(60)
            for number in range(100):
                store.intern_workload({}, f"{os.getpid()}-{number}")
        answers.put("")
    except AutotuneError as error:
        answers.put(str(error))


def test_writers_that_read_first_wait_for_each_other(database: Path) -> None:
    open_store(str(database)).close()
    assert answers_of_processes(2, intern_many, database) == ["", ""]


def test_processes_that_upgrade_the_same_file_at_once_do_it_once(database: Path) -> None:
    database.parent.mkdir()
    storage = optuna.storages.RDBStorage(f"sqlite:///{database}")
    storage.remove_session()
    storage.engine.dispose()
    ids = set(answers_of_processes(4, open_and_intern, database))
    assert len(ids) == 1, ids
    assert not ids.pop().startswith("failed")


def write_for_ever(location: str, study_id: str, workload_id: str, environment_id: str) -> None:
    with open_store(location) as store:
        for number in range(1_000_000):
            trial = TrialRecord(study_id, number, Candidate(Arm(), 8), workload_id, environment_id)
            store.start_trial(trial)
            store.finish_trial(trial.id, OutOfMemory("full"), 1.0)


def test_a_killed_writer_loses_no_more_than_its_running_trial(store: Store, location: str, new_study: NewStudy) -> None:
    study = new_study("first")
    arguments = (location, study.id, study.workload_id, study.environment_id)
    # A connection must not cross a fork.
    store.close()
    child = forks.Process(target=write_for_ever, args=arguments, daemon=True)
    child.start()
    with open_store(location) as observer:
        assert wait_until(lambda: sum(t.state != "running" for t in observer.trials(study.id)) >= 20)
        seen = sum(trial.state != "running" for trial in observer.trials(study.id))
    os.kill(child.pid, signal.SIGKILL)
    child.join(120)
    with open_store(location) as reopened:
        trials = reopened.trials(study.id)
        running = [trial for trial in trials if trial.state == "running"]
        assert len(trials) - len(running) >= seen >= 20
        assert len(running) <= 1
        assert [trial.number for trial in trials] == list(range(len(trials)))
        assert reopened.lose_running_trials(study.id) == len(running)


def test_a_signal_within_a_statement_leaves_the_file_to_writers(database: Path) -> None:
    """As where a service is killed while its search writes: the search records its end, and the next service begins."""
    with open_store(str(database), lock_timeout_seconds=0.1) as store, open_store(str(database)) as other:

        def strike(*told: object) -> None:
            if str(told[2]).startswith("INSERT"):
                event.remove(store.engine, "after_cursor_execute", strike)
                raise KeyboardInterrupt

        event.listen(store.engine, "after_cursor_execute", strike)
        try:
            store.intern_workload({}, "first")
        except KeyboardInterrupt:
            # The traceback refers to the statement.
            assert store.intern_workload({}, "second") != other.intern_workload({}, "third")
        else:
            pytest.fail("nothing was struck")
