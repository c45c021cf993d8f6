"""Cache inspections, looks and predictions in the database, under a key of everything that they depend on."""

from __future__ import annotations

import contextlib
from typing import TypeVar

from sqlalchemy import Engine, select

from autotune.core.inspection import Inspection
from autotune.core.look import LookAnswer
from autotune.core.prediction import PredictionAnswer
from autotune.core.schema import decode, encode
from autotune.store.engine import insert_if_absent, storage_errors, transaction
from autotune.store.records import now
from autotune.store.tables import AnswerRow

_KINDS: dict[type, str] = {Inspection: "inspection", LookAnswer: "look", PredictionAnswer: "prediction"}
"""What is stored, and the words for it in the database."""

T = TypeVar("T", Inspection, LookAnswer, PredictionAnswer)


class Answers:
    """The stored answers of an open database.

    Each method raises ``StorageError`` where it is locked, damaged or gone.
    """

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine = engine
        self._label = label

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return the answer of this type that is stored under a key; ``None`` where there is none or it is damaged.

        A damaged answer is no error, since the question can be asked again.
        """
        query = select(AnswerRow.document).where(AnswerRow.key == key)
        with storage_errors(self._label), transaction(self._engine, writes=False) as connection:
            row = connection.execute(query).first()
        with contextlib.suppress(ValueError):
            return decode(row.document, kind) if row is not None else None
        return None

    def keep(self, key: str, answer: Inspection | LookAnswer | PredictionAnswer) -> None:
        """Store an answer; an earlier one under the same key stays."""
        row = {"key": key, "kind": _KINDS[type(answer)], "document": encode(answer), "created_at": now()}
        with storage_errors(self._label), transaction(self._engine, writes=True) as connection:
            insert_if_absent(connection, AnswerRow, row)

    def close(self) -> None:
        """Close the connections; new ones are opened if it is used again."""
        self._engine.dispose()
