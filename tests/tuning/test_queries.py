"""A study of many trials takes as many queries as a short one."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from recorded import ComputedRunner
from searching import new_store, prepared, search
from sqlalchemy import event

from autotune.core.units import GIB
from autotune.results.json_document import report_document
from autotune.results.report import load_report
from autotune.store.opening import open_store
from autotune.store.repository import Store
from autotune.tuning.prepare import Prepared

STUDY = "many"
TRIALS = 25


def prepared_at_random(trials: int) -> Prepared:
    """A search at random over any batch, which never runs out of candidates."""
    return prepared(effective_batch=None, batch_multiple=1, sampler="random", trials=trials, study=STUDY)


def runner() -> ComputedRunner:
    return ComputedRunner(lambda candidate: GIB + candidate.per_device_train_batch_size * 0.01 * GIB)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    with new_store(folder, "many.db", optuna_tables=True) as store:
        search(store, runner(), given=prepared_at_random(TRIALS))
    return folder / "many.db"


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Iterator[Store]:
    with open_store(str(shutil.copy(written, tmp_path / "many.db"))) as opened:
        yield opened


@contextmanager
def counted_statements(store: Store) -> Iterator[list[str]]:
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
    ("show", lambda store: report_document(load_report(store, STUDY)), 10),
    ("studies", lambda store: store.studies(), 8),
    ("repeat", lambda store: search(store, runner(), given=prepared_at_random(TRIALS)), 46),
]


@pytest.mark.parametrize(("look", "most"), [look[1:] for look in LOOKS], ids=[look[0] for look in LOOKS])
def test_few_queries(store: Store, look: Callable[[Store], Any], most: int) -> None:
    with counted_statements(store) as statements:
        look(store)
    assert 0 < len(statements) <= most, statements
    # Optuna's trials are read by nobody but Optuna, and at once.
    assert len([text for text in statements if "trial_params" in text]) <= 1


def test_asking_goes_on_at_the_end(store: Store) -> None:
    run = search(store, runner(), given=prepared_at_random(TRIALS + 2))
    assert [trial.number for trial in run.trials] == list(range(TRIALS + 2))
