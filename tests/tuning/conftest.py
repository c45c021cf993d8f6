"""Make a real, empty store for a search."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from searching import new_store

from autotune.store.repository import Store


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store in ``tmp_path``; Optuna's record of a search is in its file, too, where a test has ``optuna_tables``."""
    with new_store(tmp_path, optuna_tables="optuna_tables" in request.fixturenames) as opened:
        yield opened


@pytest.fixture
def optuna_tables() -> None:
    """Have Optuna write into the file of ``store``, as in a real search, and not into memory."""
