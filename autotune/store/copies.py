"""Copy studies from one database to another: autotune's records, Optuna's, and what the queue knows of them.

Everything is read as it is at one moment and written in one transaction, so a copy is whole or not there. Ids stay
where they are unique, and are given anew where a database counts them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, insert, inspect, select
from sqlalchemy.dialects import postgresql, sqlite

from autotune.core.errors import InvalidRequestError, StorageError, UnknownStudyError, did_you_mean
from autotune.store.engine import storage_errors, transaction
from autotune.store.leases import name_of_study
from autotune.store.location import Location, resolve_location
from autotune.store.opening import open_store
from autotune.store.optuna_private import OPTUNA_TABLES
from autotune.store.queue import ENDED
from autotune.store.repository import Store
from autotune.store.tables import AnswerRow, EnvironmentRow, JobEventRow, JobRow, StudyRow, TrialRow, WorkloadRow

# Ids in one query: SQLite takes 32,766 values, and no database is faster with more.
_CHUNK = 500

_Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied."""

    studies: tuple[str, ...]
    trials: int
    jobs: int
    """Searches of a service that have ended."""
    jobs_left: int
    """Searches that wait or run there, which stay with their service."""


def copy_studies(source: str, target: str, names: Sequence[str] = ()) -> Copied:
    """Copy studies between the databases at two paths or URLs: those of these names, or every one.

    ``target`` is created where it is missing. Raises ``StorageError`` where a study of one of the names is there
    already, or is being searched, and ``UnknownStudyError`` where there is none of a name; nothing is written then.
    """
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(open_store(source, create=False))
        reading = stack.enter_context(_reading(here))
        wanted = _wanted(reading, here, names)
        if _same(resolve_location(source), resolve_location(target)):
            raise InvalidRequestError(f"{here.label!r} is both FROM and TO", "name two different databases")
        # Opened late: what cannot be copied leaves no new file behind.
        there = stack.enter_context(open_store(target))
        with storage_errors(there.label), transaction(there.engine, writes=True) as writing:
            _refuse_taken(writing, there, wanted)
            return _Copy(reading, writing).run(wanted, is_whole=not names)


def _same(one: Location, other: Location) -> bool:
    """Return whether two locations are one database; a server may have two names, which are not told."""
    if one.path is not None and other.path is not None:
        return os.path.realpath(one.path) == os.path.realpath(other.path)
    return one.url == other.url


@contextlib.contextmanager
def _reading(store: Store) -> Iterator[Connection]:
    with storage_errors(store.label), transaction(store.engine, writes=False) as connection:
        yield connection


def _wanted(connection: Connection, store: Store, names: Sequence[str]) -> list[str]:
    """Return the names of the studies that are copied, and refuse those that cannot be."""
    known = list(connection.execute(select(StudyRow.name).order_by(StudyRow.started_at)).scalars())
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, most=3, least_ratio=0.5) or "autotune studies lists those that there are"
            raise UnknownStudyError(f"there is no study {name!r} in {store.label}", hint)
    wanted = [name for name in known if not names or name in names]
    for name in wanted:
        holder = store.leases.held_in(connection, name_of_study(name))
        if holder is not None:
            raise StorageError(
                f"the study {name!r} is searched by {holder.describe()}",
                "wait for its end, or copy the others by name with --study",
            )
    return wanted


def _refuse_taken(connection: Connection, store: Store, wanted: Sequence[str]) -> None:
    optunas = OPTUNA_TABLES["studies"]
    taken = set(_among(connection, StudyRow.__table__, "name", wanted))
    taken |= set(_among(connection, optunas, "study_name", wanted))
    if taken:
        first = [name for name in wanted if name in taken]
        more = f" and {len(first) - 1} more of these studies" if len(first) > 1 else ""
        raise StorageError(
            f"{store.label} has a study named {first[0]!r}{more} already, so nothing was copied",
            "copy the others by name with --study, or choose another database",
        )


def _among(connection: Connection, table: Any, column: str, values: Iterable[Any]) -> list[Any]:
    """Return which of the values the column has."""
    return [row[column] for row in _rows(connection, table, column, values)]


def _rows(connection: Connection, table: Any, column: str, values: Iterable[Any]) -> _Rows:
    """Return the rows in which the column has one of the values, by the primary key."""
    every = list(dict.fromkeys(values))
    found: _Rows = []
    for start in range(0, len(every), _CHUNK):
        query = select(table).where(table.c[column].in_(every[start : start + _CHUNK]))
        found += [dict(row) for row in connection.execute(query.order_by(*table.primary_key)).mappings()]
    return found


class _Copy:
    """One copy: rows of a reading transaction, written in another."""

    def __init__(self, reading: Connection, writing: Connection) -> None:
        self._reading = reading
        self._writing = writing

    def run(self, names: Sequence[str], *, is_whole: bool) -> Copied:
        """Copy the studies; with ``is_whole`` also stored answers and searches that left no study."""
        studies = _rows(self._reading, StudyRow.__table__, "name", names)
        trials = _rows(self._reading, TrialRow.__table__, "study_id", (study["id"] for study in studies))
        workloads = self._intern(WorkloadRow, "workload_id", [*studies, *trials])
        environments = self._intern(EnvironmentRow, "environment_id", [*studies, *trials])
        for row in (*studies, *trials):
            row["workload_id"] = workloads[row["workload_id"]]
            row["environment_id"] = environments[row["environment_id"]]
        self._insert(StudyRow.__table__, studies)
        self._insert(TrialRow.__table__, trials)
        self._copy_optunas(names)
        if is_whole:
            self._insert_missing(AnswerRow.__table__, self._all(AnswerRow.__table__))
        jobs, left = self._copy_jobs(names, is_whole=is_whole)
        return Copied(tuple(names), len(trials), jobs, left)

    def _all(self, table: Any) -> _Rows:
        return [dict(row) for row in self._reading.execute(select(table).order_by(*table.primary_key)).mappings()]

    def _insert(self, table: Any, rows: _Rows) -> None:
        if rows:
            self._writing.execute(insert(table), rows)

    def _insert_missing(self, table: Any, rows: _Rows) -> None:
        """Insert the rows that clash with none that is there."""
        dialect = postgresql if self._writing.dialect.name == "postgresql" else sqlite
        if rows:
            self._writing.execute(dialect.insert(table).on_conflict_do_nothing(), rows)

    def _intern(
        self, kind: type[WorkloadRow] | type[EnvironmentRow], column: str, referring: Iterable[Mapping[str, Any]]
    ) -> dict[str, str]:
        """Copy what the rows refer to, unless it is there under another id; return the ids there by those here."""
        table = kind.__table__
        rows = _rows(self._reading, table, "id", (row[column] for row in referring))
        self._insert_missing(table, rows)
        there = _rows(self._writing, table, "fingerprint", (row["fingerprint"] for row in rows))
        ids = {row["fingerprint"]: row["id"] for row in there}
        return {row["id"]: ids[row["fingerprint"]] for row in rows}

    # Optuna's tables

    def _copy_optunas(self, names: Sequence[str]) -> None:
        """Copy Optuna's studies of these names; one that it does not have is filled up when the search goes on."""
        present = set(inspect(self._reading).get_table_names())
        studies = _rows(self._reading, OPTUNA_TABLES["studies"], "study_name", names)
        study_ids = self._insert_counted(OPTUNA_TABLES["studies"], studies)
        trials = _rows(self._reading, OPTUNA_TABLES["trials"], "study_id", study_ids)
        for row in trials:
            row["study_id"] = study_ids[row["study_id"]]
        trial_ids = self._insert_counted(OPTUNA_TABLES["trials"], trials)
        for table in OPTUNA_TABLES.values():
            if table.name in ("studies", "trials") or table.name not in present:
                continue
            column, ids = ("trial_id", trial_ids) if "trial_id" in table.c else ("study_id", study_ids)
            (counter,) = table.primary_key
            rows = _rows(self._reading, table, column, ids)
            for row in rows:
                row[column] = ids[row[column]]
                del row[counter.name]
            self._insert(table, rows)

    def _insert_counted(self, table: Table, rows: _Rows) -> dict[int, int]:
        """Insert rows whose id the database counts; return the new ids by the old."""
        (counter,) = table.primary_key
        old = [row.pop(counter.name) for row in rows]
        if not rows:
            return {}
        new = self._writing.execute(insert(table).returning(counter, sort_by_parameter_order=True), rows).scalars()
        return dict(zip(old, new, strict=True))

    # The queue

    def _copy_jobs(self, names: Sequence[str], *, is_whole: bool) -> tuple[int, int]:
        """Copy the searches of a service that have ended; return how many, and how many have not."""
        table: Any = JobRow.__table__
        rows = self._all(table) if is_whole else _rows(self._reading, table, "study", names)
        ended = [row for row in rows if row["state"] in ENDED]
        known = set(_among(self._writing, table, "id", (row["id"] for row in ended)))
        ended = [row for row in ended if row["id"] not in known]
        for row in ended:
            # Jobs are numbered by the database; a key counts for the service that it was sent to.
            del row["number"]
            row["idempotency_key"] = None
        self._insert(table, ended)
        self._insert(
            JobEventRow.__table__, _rows(self._reading, JobEventRow.__table__, "job_id", (row["id"] for row in ended))
        )
        return len(ended), sum(row["state"] not in ENDED for row in rows)
