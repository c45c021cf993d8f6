"""What trial processes answered, kept under a key of all that the answer depends on.

Importing this loads SQLAlchemy, but neither Alembic nor Optuna, so that a command which is told
everything by earlier ones answers at once.
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import Engine, insert, select
from sqlalchemy.exc import IntegrityError

from autotune.core.candidate import Document
from autotune.core.errors import StorageError
from autotune.store.engine import build_engine, storage_errors, transaction
from autotune.store.location import resolve_location
from autotune.store.records import now
from autotune.store.tables import AnswerRow

AnswerKind = Literal["inspection", "prediction"]

# What an answer of each kind consists of at least.
_PARTS: dict[AnswerKind, frozenset[str]] = {
    "inspection": frozenset({"context_bytes"}),
    "prediction": frozenset({"batches", "largest_batch"}),
}


class Answers:
    """The answers in an open database. Each method raises ``StorageError`` where that is locked, damaged or gone."""

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine = engine
        self._label = label

    def find(self, key: str) -> Document | None:
        """Return the answer that was kept under this key; ``None`` where there is none or it is damaged.

        A damaged answer is no reason to fail, since the same can be asked again.
        """
        query = select(AnswerRow.kind, AnswerRow.document).where(AnswerRow.key == key)
        with storage_errors(self._label), transaction(self._engine, writes=False) as connection:
            row = connection.execute(query).first()
        if row is None or not isinstance(row.document, dict) or not _PARTS[row.kind].issubset(row.document):
            return None
        return dict(row.document)

    def keep(self, key: str, kind: AnswerKind, document: Document) -> None:
        """Keeps an answer, so that nobody need ask again; the first of one key stays."""
        row = {"key": key, "kind": kind, "document": document, "created_at": now()}
        try:
            with storage_errors(self._label), transaction(self._engine, writes=True) as connection:
                same = select(AnswerRow.key).where(AnswerRow.key == key)
                if connection.execute(same).first() is None:
                    connection.execute(insert(AnswerRow).values(**row))
        except StorageError as error:
            # Where writers do not wait for each other, another may have come between.
            if not isinstance(error.__cause__, IntegrityError):
                raise

    def close(self) -> None:
        """Closes the connections; used again, it opens new ones."""
        self._engine.dispose()


def open_answers(location: str, lock_timeout_seconds: float) -> Answers | None:
    """The answers in a database, to be looked up; ``None`` where there is no database. Makes and upgrades nothing.

    Raises ``StorageError`` where ``location`` names no database; whether there are answers in it is seen on reading.
    """
    place = resolve_location(location)
    with storage_errors(place.label):
        if place.path is not None and not place.path.is_file():
            return None
        return Answers(build_engine(place, lock_timeout_seconds), place.label)
