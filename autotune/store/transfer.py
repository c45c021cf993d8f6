"""Carry studies as JSON from one database to another: between a service and the machines that search for it.

Studies and trials keep their ids. Workloads and environments are matched by fingerprint, and get the ids that they
have in the receiving database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, insert, select, update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from autotune.core.candidate import Candidate, Document
from autotune.core.errors import InvalidRequestError
from autotune.core.outcome import outcome_from_document
from autotune.core.schema import encode
from autotune.store.engine import insert_if_absent, storage_errors, transaction
from autotune.store.repository import Store
from autotune.store.tables import EnvironmentRow, StudyRow, TrialRow, UtcDateTime, WorkloadRow

_MOST_RELATED = 20
# Ids in one query: SQLite takes 32,766 values, and no database is faster with more.
_CHUNK = 500
_HINT = "both sides must be of the same version"
_WRONG_CONTENT = (KeyError, TypeError, ValueError, AttributeError, OverflowError)

_Rows = list[dict[str, Any]]
_STUDIES, _TRIALS, _WORKLOADS, _ENVIRONMENTS = (
    row.metadata.tables[row.__tablename__] for row in (StudyRow, TrialRow, WorkloadRow, EnvironmentRow)
)
_INTERNED = (("workloads", _WORKLOADS, "workload_id"), ("environments", _ENVIRONMENTS, "environment_id"))

# One study as a document


def read_study(store: Store, name: str, trial_ids: Collection[str] | None = None) -> Document | None:
    """Return a study as a JSON document, with all trials or those in ``trial_ids``; ``None`` for an unknown name."""
    with storage_errors(store.label), transaction(store.engine, writes=False) as connection:
        return _read_document(connection, name, trial_ids)


def related_studies(store: Store, model: str) -> list[Document]:
    """Return at most ``_MOST_RELATED`` of the latest finished studies of a model, whose trials a search may reuse."""
    finished = select(StudyRow.name, WorkloadRow.document).join(WorkloadRow, WorkloadRow.id == StudyRow.workload_id)
    finished = finished.where(StudyRow.state == "finished").order_by(StudyRow.started_at.desc()).limit(1000)
    with storage_errors(store.label), transaction(store.engine, writes=False) as connection:
        names = [name for name, workload in connection.execute(finished) if workload.get("model") == model]
        documents = [_read_document(connection, name) for name in names[:_MOST_RELATED]]
    return [document for document in documents if document is not None]


def studies_for(store: Store, study: str, options: Document) -> tuple[Document, ...]:
    """Return the studies that a search with its own database needs as documents: ``study`` and related ones.

    ``options`` are those of the search; with ``fresh`` it reuses no trial, so that it needs no related studies.
    """
    own, model = read_study(store, study), options.get("model")
    related = related_studies(store, model) if model and not options.get("fresh") else []
    return (*([own] if own is not None else []), *(each for each in related if each["study"]["name"] != study))


def _read_document(connection: Connection, name: str, trial_ids: Collection[str] | None = None) -> Document | None:
    """Return the document of ``read_study`` within an open transaction: rows of the four tables, by table."""
    studies = _rows(connection, _STUDIES, "name", [name])
    if not studies:
        return None
    trials = _rows(connection, _TRIALS, "study_id", [studies[0]["id"]])
    trials = sorted(trials, key=lambda row: row["number"])
    if trial_ids is not None:
        trials = [row for row in trials if row["id"] in trial_ids]
    document: Document = {"study": encode(studies[0]), "trials": encode(trials)}
    for key, table, column in _INTERNED:
        rows = _rows(connection, table, "id", (row[column] for row in (*studies, *trials)))
        document[key] = encode(rows)
    return document


def take_in(connection: Connection, document: Document, name: str | None = None) -> None:
    """Write a study and its trials from another database, over those with the same ids; further trials here stay.

    With ``name`` the study must have this name. Raises ``InvalidRequestError`` for malformed studies, and where the
    name or an id belongs to another study here: incoming ids are not trusted.
    """
    try:
        study = _as_row(_STUDIES, document["study"])
        if name is not None and study["name"] != name:
            raise InvalidRequestError(f"this is the study {study['name']!r:.100}, not {name!r}", _HINT)
        same = (StudyRow.name == study["name"]) | (StudyRow.id == study["id"])
        for found in connection.execute(select(StudyRow.id, StudyRow.name).where(same)):
            if tuple(found) != (study["id"], study["name"]):
                raise InvalidRequestError(f"there is another study named {found.name!r}", "use another name")
        trials = [_as_row(_TRIALS, row) for row in document["trials"]]
        for known in _rows(connection, _TRIALS, "id", (trial["id"] for trial in trials)):
            if known["study_id"] != study["id"]:
                raise InvalidRequestError("one of its trials belongs to another study", _HINT)
        for key, table, column in _INTERNED:
            ids = _intern(connection, table, [_as_row(table, row) for row in document[key]])
            for row in (study, *trials):
                row[column] = ids[row[column]]
        _put(connection, _STUDIES, study)
        for trial in trials:
            # Decoded only to refuse what could not be read later.
            Candidate.from_parameters(trial["candidate"])
            if trial["outcome"] is not None:
                outcome_from_document(trial["outcome"])
            _put(connection, _TRIALS, {**trial, "study_id": study["id"]})
    except (*_WRONG_CONTENT, SQLAlchemyError) as error:
        # Where the database is unreachable or full, the sender may send the document again.
        if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError | DataError):
            raise
        raise InvalidRequestError(f"this study cannot be taken in: {error}"[:300], _HINT) from error


def take_in_study(store: Store, document: Document, name: str | None = None) -> None:
    """Write a study from another database in a transaction of its own. Raises the errors of ``take_in``."""
    with storage_errors(store.label), transaction(store.engine, writes=True) as connection:
        take_in(connection, document, name)


def _intern(connection: Connection, table: Table, rows: _Rows) -> dict[str, str]:
    """Insert workloads or environments with new fingerprints; return by their incoming ids the ids they have here."""
    for row in rows:
        insert_if_absent(connection, table, row)
    stored = _rows(connection, table, "fingerprint", (row["fingerprint"] for row in rows))
    ids = {row["fingerprint"]: row["id"] for row in stored}
    return {row["id"]: ids[row["fingerprint"]] for row in rows}


def _put(connection: Connection, table: Table, row: Document) -> None:
    """Insert a row, or overwrite the row with the same id."""
    if connection.execute(update(table).where(table.c.id == row["id"]).values(**row)).rowcount == 0:
        connection.execute(insert(table).values(**row))


def _as_row(table: Table, document: Document) -> Document:
    """Return the columns of a row from JSON, with times decoded. Raises ``ValueError`` for unknown names."""
    if unknown := document.keys() - set(table.c.keys()):
        raise ValueError(f"unknown columns {', '.join(sorted(unknown))[:100]}")
    times = {name for name, value in document.items() if value and isinstance(table.c[name].type, UtcDateTime)}
    return {name: datetime.fromisoformat(value) if name in times else value for name, value in document.items()}


def _rows(connection: Connection, table: Table, column: str, values: Iterable[Any]) -> _Rows:
    """Return the rows in which a column has one of the values, by primary key within each chunk of values."""
    unique = list(dict.fromkeys(values))
    rows: _Rows = []
    for start in range(0, len(unique), _CHUNK):
        query = select(table).where(table.c[column].in_(unique[start : start + _CHUNK]))
        rows += [dict(row) for row in connection.execute(query.order_by(*table.primary_key)).mappings()]
    return rows
