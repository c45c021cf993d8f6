"""Studies of thousands of trials: as many queries as a short one takes, and no more than is needed of Optuna's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from many import STUDY, prepared_many, runner, write_many
from searching import search
from sqlalchemy import event

from autotune.results.report import load_report
from autotune.results.text import report_document
from autotune.store import Store, open_store

TRIALS = 2000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "many.db", TRIALS)


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Iterator[Store]:
    with open_store(str(shutil.copy(written, tmp_path / "many.db"))) as opened:
        yield opened


@contextmanager
def counted(store: Store) -> Iterator[list[str]]:
    """The statements that the store and Optuna's storage send meanwhile."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    engines = (store._engine, store.optuna.engine)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    yield statements
    for engine in engines:
        event.remove(engine, "before_cursor_execute", note)


LOOKS: list[tuple[str, Callable[[Store], Any], int]] = [
    ("show", lambda store: report_document(load_report(store, STUDY)), 8),
    ("studies", lambda store: store.studies(), 8),
    ("repeat", lambda store: search(store, runner(), given=prepared_many(trials=TRIALS)), 40),
]


@pytest.mark.parametrize(("look", "most"), [look[1:] for look in LOOKS], ids=[look[0] for look in LOOKS])
def test_few_queries(store: Store, look: Callable[[Store], Any], most: int) -> None:
    with counted(store) as statements:
        look(store)
    assert 0 < len(statements) <= most, statements


def test_repeating_a_finished_search_reads_no_trial_of_optunas(store: Store) -> None:
    with counted(store) as statements:
        run = search(store, runner(), given=prepared_many(trials=TRIALS))
    assert len(run.trials) == TRIALS
    assert not [text for text in statements if "trial_params" in text]


def test_asking_goes_on_at_the_end(store: Store) -> None:
    run = search(store, runner(), given=prepared_many(trials=TRIALS + 2))
    assert len(run.trials) == TRIALS + 2


def test_optunas_trials_are_read_as_optuna_reads_them(store: Store) -> None:
    study_id = store.optuna.get_study_id_from_name(STUDY)
    theirs = optuna.load_study(study_name=STUDY, storage=store.optuna)
    for value in (float("inf"), float("-inf")):
        theirs.tell(theirs.ask(), value)
    theirs.tell(theirs.ask(), state=optuna.trial.TrialState.FAIL)
    theirs.ask()
    plain = optuna.storages.RDBStorage(store.url)
    expected = plain.get_all_trials(study_id)
    assert store.optuna.get_all_trials(study_id) == expected
    assert len(expected) == TRIALS + 4
    reporting = theirs.ask()
    reporting.report(1.0, step=1)
    assert store.optuna.get_all_trials(study_id) == plain.get_all_trials(study_id)
    plain.remove_session()
    plain.engine.dispose()
