"""Carry studies from one database to another as JSON, so that a study can be continued elsewhere.

Rows are copied as they are, under their ids; workloads and environments are matched by fingerprint. Optuna's tables
are not: a search fills them up (see ``OptunaStudy.settle``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, delete, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from autotune.core.candidate import Candidate, Document
from autotune.core.errors import InvalidRequestError
from autotune.core.outcome import outcome_from_document
from autotune.store.engine import storage_errors, transaction
from autotune.store.records import new_id
from autotune.store.tables import Base, EnvironmentRow, StudyRow, TrialRow, UtcDateTime, WorkloadRow

_MOST_RELATED = 20
_RENAME_OF_OPTUNA = text("UPDATE studies SET study_name = :free WHERE study_name = :name")
_HINT = "the agent and the service must be of the same version"


def read_study(engine: Engine, name: str, trial_ids: Collection[str] | None = None) -> Document | None:
    """Return a study with its trials, or those of these ids, as JSON; ``None`` where there is none of this name."""
    with transaction(engine, writes=False) as connection:
        return _read(connection, name, trial_ids)


def _read(connection: Connection, name: str, trial_ids: Collection[str] | None = None) -> Document | None:
    study = _row(connection, StudyRow, StudyRow.name == name)
    if study is None:
        return None
    trials = select(TrialRow.__table__).where(TrialRow.study_id == study["id"]).order_by(TrialRow.number)
    if trial_ids is not None:
        trials = trials.where(TrialRow.id.in_(trial_ids))
    return {
        "study": study,
        "workload": _row(connection, WorkloadRow, WorkloadRow.id == study["workload_id"]),
        "environment": _row(connection, EnvironmentRow, EnvironmentRow.id == study["environment_id"]),
        "trials": [_as_json(row) for row in connection.execute(trials).mappings()],
    }


def related_studies(engine: Engine, model: str) -> list[Document]:
    """Return the latest finished studies of a model of this name, whose trials a search may reuse."""
    ended = select(StudyRow.name, WorkloadRow.document).join(WorkloadRow, WorkloadRow.id == StudyRow.workload_id)
    ended = ended.where(StudyRow.state == "finished").order_by(StudyRow.started_at.desc()).limit(1000)
    with transaction(engine, writes=False) as connection:
        names = [name for name, workload in connection.execute(ended) if workload.get("model") == model]
        found = [_read(connection, name) for name in names[:_MOST_RELATED]]
    return [document for document in found if document is not None]


_WRONG_CONTENT = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def take_in(connection: Connection, document: Document, name: str | None = None) -> None:
    """Write a study that another database has, over what is here of it.

    With ``name``, the study must bear it, as the one that an agent was given. Raises ``InvalidRequestError`` for what
    is no study, and where another study has its name here.
    """
    try:
        study = _as_row(StudyRow, document["study"])
        if name is not None and study["name"] != name:
            raise InvalidRequestError(f"this is the study {study['name']!r:.100}, not {name!r}", _HINT)
        known = connection.execute(select(StudyRow.id).where(StudyRow.name == study["name"])).scalar()
        if known not in (None, study["id"]):
            raise InvalidRequestError(f"there is another study named {study['name']!r}", "use another name")
        for key, table in (("workload", WorkloadRow), ("environment", EnvironmentRow)):
            study[f"{key}_id"] = _intern(connection, table, document[key])
        _put(connection, StudyRow, study)
        for told in document["trials"]:
            trial = _as_row(TrialRow, told)
            Candidate.from_parameters(trial["candidate"])
            if trial["outcome"] is not None:
                outcome_from_document(trial["outcome"])
            ids = {name: study[name] for name in ("workload_id", "environment_id")}
            _put(connection, TrialRow, {**trial, **ids, "study_id": study["id"]})
    except (*_WRONG_CONTENT, SQLAlchemyError) as error:
        # A database that is away or full is no fault of the document, which is sent again then.
        if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError | DataError):
            raise
        raise InvalidRequestError(f"this study cannot be taken in: {error}"[:300], _HINT) from error


def take_in_study(engine: Engine, document: Document) -> None:
    """Write a study that another database has, in a transaction of its own; raises as ``take_in`` does."""
    with storage_errors(engine.url.render_as_string()), transaction(engine, writes=True) as connection:
        take_in(connection, document)


def take_in_all(engine: Engine, documents: Collection[Document]) -> None:
    """Write studies that another database has; one whose name is taken here by another study is left out."""
    for document in documents:
        with contextlib.suppress(InvalidRequestError):
            take_in_study(engine, document)


def make_way(engine: Engine, name: str, document: Document | None) -> None:
    """Let a study of this name be gone on with here as ``document`` has it; ``None`` where it has yet to begin.

    Another study of that name is renamed. Of the study itself those trials are removed that the document does not
    have: they ended here when the search belonged to somebody else, who may have run the same candidates. Optuna's
    study is renamed, too, and made anew by the search.
    """
    free = f"{name[:460]}@{new_id()[:12]}"
    other = StudyRow.name == name
    with transaction(engine, writes=True) as connection:
        if document is not None:
            study_id, known = document["study"]["id"], [trial["id"] for trial in document["trials"]]
            connection.execute(delete(TrialRow).where(TrialRow.study_id == study_id, TrialRow.id.not_in(known)))
            other &= StudyRow.id != study_id
        connection.execute(update(StudyRow).where(other).values(name=free))
        connection.execute(_RENAME_OF_OPTUNA, {"free": free, "name": name})


def _row(connection: Connection, table: type[Base], where: Any) -> Document | None:
    found = connection.execute(select(table.__table__).where(where)).mappings().first()
    return None if found is None else _as_json(found)


def _as_json(row: Any) -> Document:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}


def _as_row(table: type[Base], document: Document) -> Document:
    """Return the columns of a row from JSON; unknown names are a ``ValueError``."""
    columns = {column.name: column for column in table.__table__.columns}
    if unknown := document.keys() - columns.keys():
        raise ValueError(f"unknown columns {', '.join(sorted(unknown))[:100]}")
    is_time = {name for name, column in columns.items() if isinstance(column.type, UtcDateTime)}
    return {
        name: datetime.fromisoformat(value) if name in is_time and value is not None else value
        for name, value in document.items()
    }


def _intern(connection: Connection, table: type[WorkloadRow] | type[EnvironmentRow], document: Document) -> str:
    fingerprint = document["fingerprint"]
    same = select(table.id).where(table.fingerprint == fingerprint)
    known = connection.execute(same).scalar()
    if known is not None:
        return known
    row = _as_row(table, document)
    # Another process may record it in between, where writers do not wait for each other.
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(table).values(**row).on_conflict_do_nothing())
    return str(connection.execute(same).scalar_one())


def _put(connection: Connection, table: type[StudyRow] | type[TrialRow], row: Document) -> None:
    """Insert a row, or write it over the one of the same id."""
    if connection.execute(update(table).where(table.id == row["id"]).values(**row)).rowcount == 0:
        connection.execute(insert(table).values(**row))
