"""Make a real, empty store for a search."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from searching import new_store

from autotune.store.repository import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store in ``tmp_path``."""
    with new_store(tmp_path) as opened:
        yield opened
