"""Find stored answers without opening the database as a store: of a SQLite file with Python's own module.

A command whose answers are all stored imports neither SQLAlchemy nor Alembic nor Optuna, which takes longer than all
the rest of it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autotune.core.inspection import Inspection
from autotune.core.prediction import PredictionAnswer
from autotune.core.schema import decode
from autotune.store.location import plain_path

if TYPE_CHECKING:
    from autotune.store.stored_answers import Answers

T = TypeVar("T", Inspection, PredictionAnswer)

# The table of ``autotune.store.tables.AnswerRow``.
_QUERY = "SELECT document FROM autotune_answers WHERE key = ?"


class AnswerFile:
    """The answers that are stored in a SQLite file.

    ``find`` raises ``StorageError`` where it is locked, damaged or gone.
    """

    def __init__(self, path: Path, label: str, lock_timeout_seconds: float) -> None:
        self._path = path
        self._label = label
        self._timeout_seconds = lock_timeout_seconds
        self._connection: sqlite3.Connection | None = None

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the answer of this type that is stored under a key; ``None`` where there is none or it is damaged."""
        try:
            if self._connection is None:
                # ``rw`` creates no file where the database is gone. Unlike ``ro`` it can roll back the transaction of a
                # process that was killed; SQLite falls back to reading where the file may not be written.
                self._connection = sqlite3.connect(
                    f"{self._path.absolute().as_uri()}?mode=rw",
                    uri=True,
                    timeout=self._timeout_seconds,
                    isolation_level=None,
                )
            row = self._connection.execute(_QUERY, (key,)).fetchone()
            document = json.loads(row[0]) if row is not None else None
        except (sqlite3.Error, OSError, ValueError):
            from autotune.store.engine import storage_errors

            with storage_errors(self._label):
                raise
        with contextlib.suppress(ValueError):
            return decode(document, kind) if document is not None else None
        return None

    def close(self) -> None:
        """Close the connection; a new one is opened if it is used again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def open_answers(location: str, lock_timeout_seconds: float) -> AnswerFile | Answers | None:
    """Return the answers in a database; ``None`` where there is no database. Creates and upgrades nothing.

    Raises ``StorageError`` where ``location`` is no database location. Whether the file can be read is seen on reading.
    """
    path = plain_path(location)
    if path is None:
        from autotune.store.engine import build_engine, storage_errors
        from autotune.store.location import resolve_location
        from autotune.store.stored_answers import Answers

        place = resolve_location(location)
        with storage_errors(place.label):
            if place.path is not None and not place.path.is_file():
                return None
            return Answers(build_engine(place, lock_timeout_seconds), place.label)
    label = location.strip()
    try:
        is_there = path.is_file()
    except OSError:
        # A folder that may not be entered, or too long a name.
        from autotune.store.engine import storage_errors

        with storage_errors(label):
            raise
    return AnswerFile(path, label, lock_timeout_seconds) if is_there else None
