"""Cache answers of trial processes in the database: inspections, looks and predictions, by a key of the question.

An answer whose key is known is found in a SQLite file with Python's own module. A command whose answers are all stored
imports neither SQLAlchemy nor Alembic, which takes longer than all the rest of it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autotune.core.inspection import Inspection
from autotune.core.look import LookAnswer
from autotune.core.prediction import PredictionAnswer
from autotune.core.schema import decode, encode
from autotune.store.location import plain_path

if TYPE_CHECKING:
    from sqlalchemy import Engine

_KINDS: dict[type, str] = {Inspection: "inspection", LookAnswer: "look", PredictionAnswer: "prediction"}
"""The types of answers that are stored, and their names in the database."""

T = TypeVar("T", Inspection, LookAnswer, PredictionAnswer)

# The table of ``autotune.store.tables.AnswerRow``.
_QUERY = "SELECT document FROM autotune_answers WHERE key = ?"


class Answers:
    """The stored answers of a database that SQLAlchemy has opened.

    Each method raises ``StorageError`` where it is locked, damaged or gone.
    """

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine = engine
        self._label = label

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the stored answer to a key, decoded as a type; ``None`` where it is missing or damaged."""
        from sqlalchemy import select

        from autotune.store.engine import storage_errors, transaction
        from autotune.store.tables import AnswerRow

        query = select(AnswerRow.document).where(AnswerRow.key == key)
        with storage_errors(self._label), transaction(self._engine, writes=False) as connection:
            document = connection.execute(query).scalar()
        return _decoded(document, kind)

    def keep(self, key: str, answer: Inspection | LookAnswer | PredictionAnswer) -> None:
        """Store an answer under a key, unless the key has an answer."""
        from autotune.store.engine import insert_if_absent, storage_errors, transaction
        from autotune.store.records import now
        from autotune.store.tables import AnswerRow

        row = {"key": key, "kind": _KINDS[type(answer)], "document": encode(answer), "created_at": now()}
        with storage_errors(self._label), transaction(self._engine, writes=True) as connection:
            insert_if_absent(connection, AnswerRow, row)

    def close(self) -> None:
        """Close the connections. Later use opens new ones."""
        self._engine.dispose()


class AnswerFile:
    """The answers in a SQLite file, read without importing SQLAlchemy; the file is opened by the first ``find``.

    ``find`` raises ``StorageError`` where it is locked, damaged or gone.
    """

    def __init__(self, path: Path, label: str, lock_timeout_seconds: float) -> None:
        self._path = path
        self._label = label
        self._timeout_seconds = lock_timeout_seconds
        self._connection: sqlite3.Connection | None = None

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the stored answer to a key, decoded as a type; ``None`` where it is missing or damaged."""
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

            # Imported here, since it imports SQLAlchemy; the error is raised again to be translated.
            with storage_errors(self._label):
                raise
        return _decoded(document, kind)

    def close(self) -> None:
        """Close the connection. Later use opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _decoded(document: object, kind: type[T]) -> T | None:
    """Return the stored answer of a document; ``None`` where it is missing or damaged, since it can be asked again."""
    with contextlib.suppress(ValueError):
        return decode(document, kind) if document is not None else None
    return None


def open_answers(location: str, lock_timeout_seconds: float) -> AnswerFile | Answers | None:
    """Return the answers in a database, without creating or upgrading it; ``None`` where its file is missing.

    Raises ``StorageError`` where ``location`` is no database location. Unreadable files are detected on reading.
    """
    path, label = plain_path(location), location.strip()
    try:
        if path is not None:
            return AnswerFile(path, label, lock_timeout_seconds) if path.is_file() else None
    except OSError:
        # A folder that may not be entered, or too long a name.
        from autotune.store.engine import storage_errors

        with storage_errors(label):
            raise
    from autotune.store.engine import build_engine, storage_errors
    from autotune.store.location import resolve_location

    place = resolve_location(location)
    with storage_errors(place.label):
        if place.path is not None and not place.path.is_file():
            return None
        return Answers(build_engine(place, lock_timeout_seconds), place.label)
