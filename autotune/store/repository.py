"""Read and write the records: every method is one short transaction and returns plain values.

Importing this loads SQLAlchemy, but not Alembic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from sqlalchemy import Connection, Engine, Row, Select, Text, cast, delete, func, insert, select, update

from autotune.core.candidate import Candidate, Document
from autotune.core.errors import StorageError, UnknownStudyError, did_you_mean
from autotune.core.look import Look
from autotune.core.outcome import Completed, Failed, Outcome, outcome_document, outcome_from_document
from autotune.core.schema import decode, encode
from autotune.store.answers import Answers
from autotune.store.engine import build_engine, insert_if_absent, storage_errors, sync_log, transaction
from autotune.store.leases import Leases, find_lease, name_of_study
from autotune.store.location import Location, resolve_location
from autotune.store.queue import Queue
from autotune.store.records import LeftOut, PastTrial, StopReason, StudyRecord, StudySummary, TrialRecord, new_id, now
from autotune.store.tables import EnvironmentRow, StudyRow, TrialRow, WorkloadRow

# Set when the study is created. All other columns may change until it ends, and again when it is resumed.
_FIXED_IN_A_STUDY = frozenset({"id", "name", "started_at"})


class Store:
    """An open database, returned by ``open_store``; to be closed, or used in a ``with`` statement.

    Any method raises ``StorageError`` where the database is locked, damaged or gone.
    """

    def __init__(self, location: Location, engine: Engine) -> None:
        self.engine = engine
        self.path = location.path
        """The SQLite file; ``None`` where the database is on a server."""
        self.label = location.label
        """The database's location as the user wrote it, without a password."""
        self.answers = Answers(engine, location.label)
        """Stored answers of trial processes."""
        self.queue = Queue(engine, location.label)
        """The jobs of a service and its tokens."""
        self.leases = Leases(engine, location.label)
        """Who works on which study."""
        self._held: tuple[str, str] | None = None
        """The study that this process works on, with the token of its lease; see ``hold``."""

    def close(self) -> None:
        """Close every connection. The store cannot be used afterwards; closing it twice is allowed."""
        self.engine.dispose()

    def sync(self) -> None:
        """Wait until all commits are on the disk, where a commit itself does not (``leave_syncing_to_checkpoints``)."""
        sync_log(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The lease of the study that this process works on

    def hold(self, study: str, token: str) -> None:
        """Make every later write of a study or a trial check first that this study's lease still has this token.

        A process that has lost the lease to another then writes nothing more.
        """
        self._held = study, token

    def let_go(self) -> None:
        """Stop checking a lease before writes."""
        self._held = None

    # Workloads and environments

    def intern_environment(self, document: Document, fingerprint: str) -> str:
        """Return the id of the environment with this fingerprint, recording it if it is new."""
        return self._intern_row(EnvironmentRow, document, fingerprint)

    def intern_workload(self, document: Document, fingerprint: str) -> str:
        """Return the id of the workload with this fingerprint, recording it if it is new."""
        return self._intern_row(WorkloadRow, document, fingerprint)

    def environment(self, environment_id: str) -> Document:
        """Return the environment with this id. Raises ``ValueError`` for an unknown id."""
        return self._document_of_row(EnvironmentRow, environment_id)

    def workload_of(self, study: StudyRecord) -> Document:
        """Return a study's workload, with the paths of this study's dataset.

        Studies with equal data in other places share a workload, which has the paths of the first.
        """
        workload = self._document_of_row(WorkloadRow, study.workload_id)
        paths = study.request.get("data_at")
        return {**workload, "data": {**workload["data"], **paths}} if paths and workload.get("data") else workload

    # Studies

    def create_study(self, study: StudyRecord) -> None:
        """Record a new study; raises ``StorageError`` where its name is taken."""
        with self._guarded() as connection:
            if not insert_if_absent(connection, StudyRow, _study_columns(study)):
                raise StorageError(
                    f"{self.label} has a study named {study.name!r} already", "choose another name with --study"
                )

    def update_study(self, study: StudyRecord) -> None:
        """Update the study with the same id, except its name and start.

        Raises ``StorageError`` where there is none with this id.
        """
        values = {name: value for name, value in _study_columns(study).items() if name not in _FIXED_IN_A_STUDY}
        with self._guarded() as connection:
            if connection.execute(update(StudyRow).where(StudyRow.id == study.id).values(**values)).rowcount == 0:
                raise StorageError(
                    f"the study {study.name!r} ({study.id}) is no longer in {self.label}",
                    "somebody has deleted it or exchanged the database: search anew",
                )

    def study(self, name: str) -> StudyRecord | None:
        """Return the study with this name; ``None`` where there is none."""
        with self._transaction(is_single=True) as connection:
            row = connection.execute(select(*_STUDY_COLUMNS).where(StudyRow.name == name)).first()
        return None if row is None else _study_record(row._mapping)

    def names_of(self, names: Collection[str]) -> set[str]:
        """Return which of these names belong to existing studies."""
        with self._transaction(is_single=True) as connection:
            return set(connection.execute(select(StudyRow.name).where(StudyRow.name.in_(names))).scalars())

    def existing_study(self, name: str) -> StudyRecord:
        """Return the study with this name; raises ``UnknownStudyError``, with similar names, for an unknown name.

        Its state is ``interrupted`` where it is recorded as running but no process runs it.
        """
        study = self.study(name)
        if study is not None:
            return self._interrupted_if_abandoned(study)
        names = [summary.study.name for summary in self.studies()]
        hint = did_you_mean(name, names, most=3, least_ratio=0.5) or f"the newest are {', '.join(names[:5])}"
        raise UnknownStudyError(
            f"there is no study {name!r} in {self.label}", hint if names else "run autotune search first"
        )

    def studies(self) -> list[StudySummary]:
        """Return every study, the newest first; states as in ``existing_study``."""
        with self._transaction() as connection:
            rows = connection.execute(_STUDIES_WITH_DOCUMENTS).all()
            states = select(TrialRow.study_id, TrialRow.state, func.count()).group_by(TrialRow.study_id, TrialRow.state)
            counts = {(study_id, state): count for study_id, state, count in connection.execute(states)}
            best_ids = select(StudyRow.best_trial_id).where(StudyRow.best_trial_id.is_not(None))
            best = {trial.id: trial for trial in _read_trials(connection, _TRIALS.where(TrialRow.id.in_(best_ids)))}
        studies = [_study_record(row._mapping) for row in rows]
        return [
            StudySummary(
                study=self._interrupted_if_abandoned(study),
                workload=row.workload_document,
                environment=row.environment_document,
                running=counts.get((study.id, "running"), 0),
                completed=counts.get((study.id, "completed"), 0),
                out_of_memory=counts.get((study.id, "out_of_memory"), 0),
                failed=counts.get((study.id, "failed"), 0),
                best=best.get(study.best_trial_id or ""),
            )
            for row, study in zip(rows, studies, strict=True)
        ]

    def _interrupted_if_abandoned(self, study: StudyRecord) -> StudyRecord:
        """Return a study as interrupted where it is recorded as running but no process holds its lease."""
        if study.state != "running" or self.leases.holder(name_of_study(study.name)) is not None:
            return study
        return dataclasses.replace(study, state="interrupted")

    # Trials

    def start_trial(self, trial: TrialRecord) -> None:
        """Record a trial that is about to run, or one whose outcome is known from another study."""
        values = _columns(trial) | {
            "candidate": trial.candidate.recorded_parameters(),
            "state": trial.state,
            "outcome": None if trial.outcome is None else outcome_document(trial.outcome),
        }
        with self._guarded() as connection:
            connection.execute(insert(TrialRow).values(**values))

    def finish_trial(self, trial_id: str, outcome: Outcome, seconds: float) -> None:
        """Record how a running trial ended. Raises ``StorageError`` where no trial with this id is running.

        That happens where another host searches the same study, and has taken this trial for a killed search's.
        """
        ended = {"state": outcome.state, "outcome": outcome_document(outcome), "seconds": seconds}
        running = (TrialRow.id == trial_id) & (TrialRow.state == "running")
        with self._guarded() as connection:
            if connection.execute(update(TrialRow).where(running).values(**ended)).rowcount == 0:
                raise StorageError(
                    f"no trial with the id {trial_id} is running in {self.label}: another search has ended it",
                    "let one search at a time work on a study, then go on with autotune resume",
                )

    def change_outcome(self, trial_id: str, outcome: Outcome) -> None:
        """Replace the recorded outcome of an ended trial, after later measurements have changed what is known of it."""
        values = {"state": outcome.state, "outcome": outcome_document(outcome)}
        with self._guarded() as connection:
            connection.execute(update(TrialRow).where(TrialRow.id == trial_id).values(**values))

    def drop_reused_trials(self, study_id: str) -> None:
        """Delete a study's copies of completed trials of other studies; the originals stay."""
        copies = (TrialRow.study_id == study_id) & (TrialRow.stage == "reused") & (TrialRow.state == "completed")
        with self._guarded() as connection:
            connection.execute(delete(TrialRow).where(copies))

    def lose_running_trials(self, study_id: str, message: str = "the search was killed during this trial") -> int:
        """Mark every trial that is recorded as running as interrupted, and return their number.

        For a search that resumes after it was killed. The duration of these trials is unknown. Raises ``StorageError``
        where another process holds the study's lease: its trials still run.
        """
        lost = Failed(reason="interrupted", message=message)
        running = (TrialRow.study_id == study_id) & (TrialRow.state == "running")
        values = {"state": lost.state, "outcome": outcome_document(lost)}
        with self._guarded() as connection:
            name = connection.execute(select(StudyRow.name).where(StudyRow.id == study_id)).scalar()
            holder = self.leases.held_in(connection, name_of_study(name)) if name is not None else None
            if holder is not None and (name, holder.token) != self._held:
                raise StorageError(
                    f"the study {name!r} is searched by {holder.describe()}",
                    "add --wait to wait for its end, or name another",
                )
            return connection.execute(update(TrialRow).where(running).values(**values)).rowcount

    def trial(self, trial_id: str) -> TrialRecord | None:
        """Return the trial with this id; ``None`` where there is none."""
        with self._transaction() as connection:
            trials = _read_trials(connection, _TRIALS.where(TrialRow.id == trial_id))
        return trials[0] if trials else None

    def trials(self, study_id: str) -> list[TrialRecord]:
        """Return the study's trials in their order."""
        of_study = _TRIALS.where(TrialRow.study_id == study_id).order_by(TrialRow.number, TrialRow.started_at)
        with self._transaction() as connection:
            return _read_trials(connection, of_study)

    def trials_of_winners(self) -> dict[str, list[TrialRecord]]:
        """Return by study id the trials of every study with a winner, in order; unreadable trials are left out."""
        with_winner = select(StudyRow.id).where(StudyRow.best_trial_id.is_not(None))
        query = _TRIALS.where(TrialRow.study_id.in_(with_winner)).order_by(TrialRow.number, TrialRow.started_at)
        by_study: dict[str, list[TrialRecord]] = {}
        for trial, *_ in self._readable(query):
            by_study.setdefault(trial.study_id, []).append(trial)
        return by_study

    def repeated_trials(self, environment_ids: Collection[str]) -> list[TrialRecord]:
        """Return the completed trials of which there are several of the same candidate, workload and environment.

        They tell how much measurements differ from process to process. Unreadable trials are left out.
        """
        same = TrialRow.environment_id, TrialRow.workload_id, cast(TrialRow.candidate, Text)
        completed = TrialRow.environment_id.in_(environment_ids), TrialRow.state == "completed"
        counted = (
            select(TrialRow.id, func.count().over(partition_by=same).label("repeats"))
            .where(*completed, TrialRow.stage != "reused")
            .subquery()
        )
        query = _TRIALS.join(counted, counted.c.id == TrialRow.id).where(counted.c.repeats > 1)
        return [trial for trial, *_ in self._readable(query.order_by(TrialRow.started_at))]

    def past_trials(self, study: StudyRecord, *, elsewhere: bool = False) -> list[PastTrial]:
        """Return the trials of other studies with this study's environment and workload, oldest first.

        With ``elsewhere``, return trials in other environments instead, also of this study, which may have moved to
        another machine. Only trials that completed or ran out of memory count, and no copies of reused trials.
        Unreadable trials are left out.
        """
        here = TrialRow.environment_id == study.environment_id
        query = _PAST_TRIALS.where(
            ~here if elsewhere else here & (TrialRow.study_id != study.id), TrialRow.workload_id == study.workload_id
        )
        return [PastTrial(*found) for found in self._readable(query)]

    # Within

    @contextmanager
    def _guarded(self) -> Iterator[Connection]:
        """Open a transaction that writes; raises ``StorageError`` where this process has lost its study's lease."""
        with self._transaction(writes=True) as connection:
            if self._held is not None:
                study, token = self._held
                lease = find_lease(connection, name_of_study(study), locks_row=True)
                if lease is None or lease.token != token:
                    by = f": {lease.describe()} has taken it over" if lease is not None else ""
                    raise StorageError(
                        f"the study {study!r} is no longer this search's{by}",
                        "this search was not heard of for too long and writes nothing more; autotune resume goes on "
                        "with the study once nobody searches it",
                    )
            yield connection

    @contextmanager
    def _transaction(self, *, writes: bool = False, is_single: bool = False) -> Iterator[Connection]:
        """Open a transaction (see ``engine.transaction``) whose errors are translated to ``StorageError``."""
        opened = transaction(self.engine, writes=writes, is_single=is_single)
        with storage_errors(self.label), opened as connection:
            yield connection

    def _readable(self, query: Select[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield a tuple for each readable trial of a query: the trial, then the query's further columns."""
        with self._transaction() as connection:
            rows = connection.execute(query).all()
        for row in rows:
            with suppress(ValueError, KeyError, TypeError):
                yield _trial_record(row[: len(_TRIAL_FIELDS)]), *row[len(_TRIAL_FIELDS) :]

    def _intern_row(self, table: type[EnvironmentRow] | type[WorkloadRow], document: Document, fingerprint: str) -> str:
        """Return the id of the row with this fingerprint, inserting it if it is new."""
        row = {"id": new_id(), "fingerprint": fingerprint, "document": document, "created_at": now()}
        with self._transaction(writes=True) as connection:
            if insert_if_absent(connection, table, row):
                return str(row["id"])
            return str(connection.execute(select(table.id).where(table.fingerprint == fingerprint)).scalar_one())

    def _document_of_row(self, table: type[EnvironmentRow] | type[WorkloadRow], row_id: str) -> Document:
        """Return the document of a row; raises ``ValueError`` for an unknown id."""
        with self._transaction(is_single=True) as connection:
            document: Document | None = connection.execute(select(table.document).where(table.id == row_id)).scalar()
        if document is None:
            raise ValueError(f"{table.__tablename__} has no row {row_id}")
        return document


_STUDY_FIELDS = tuple(field.name for field in dataclasses.fields(StudyRecord))
_STUDY_COLUMNS = tuple(getattr(StudyRow, name) for name in _STUDY_FIELDS)
_STUDIES_WITH_DOCUMENTS = (
    select(
        *_STUDY_COLUMNS,
        WorkloadRow.document.label("workload_document"),
        EnvironmentRow.document.label("environment_document"),
    )
    .join(WorkloadRow, WorkloadRow.id == StudyRow.workload_id)
    .join(EnvironmentRow, EnvironmentRow.id == StudyRow.environment_id)
    .order_by(StudyRow.started_at.desc())
)
_TRIAL_FIELDS = tuple(field.name for field in dataclasses.fields(TrialRecord))
_TRIALS: Select[Any] = select(*(getattr(TrialRow, name) for name in _TRIAL_FIELDS))
_PAST_TRIALS: Select[Any] = (
    select(*(getattr(TrialRow, name) for name in _TRIAL_FIELDS), StudyRow.name, StudyRow.ceiling)
    .join(StudyRow, StudyRow.id == TrialRow.study_id)
    .where(TrialRow.state.in_(("completed", "out_of_memory")), TrialRow.stage != "reused")
    .order_by(TrialRow.started_at)
)


def _columns(record: StudyRecord | TrialRecord) -> dict[str, Any]:
    """Return a record's fields, unconverted: ``dataclasses.asdict`` would make dictionaries of outcomes."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _study_columns(study: StudyRecord) -> dict[str, Any]:
    """Return a study's columns as they are stored, with nested values as JSON documents."""
    left_out = [dataclasses.asdict(each) for each in study.left_out] or None
    return _columns(study) | {"left_out": left_out, "look": encode(study.look) if study.look is not None else None}


def _study_record(row: Mapping[Any, Any]) -> StudyRecord:
    """Return the study of a row, the inverse of ``_study_columns``."""
    fields = {name: row[name] for name in _STUDY_FIELDS}
    reason, left_out = fields["stop_reason"], fields["left_out"]
    fields["stop_reason"] = None if reason is None else StopReason(reason)
    fields["left_out"] = decode(left_out or [], tuple[LeftOut, ...])
    fields["look"] = decode(fields["look"], Look) if fields["look"] is not None else None
    return StudyRecord(**fields)


def _trial_record(row: Sequence[Any]) -> TrialRecord:
    """Return the trial of a row. Raises ``ValueError``, ``KeyError`` or ``TypeError`` where it is unreadable."""
    fields = dict(zip(_TRIAL_FIELDS, row, strict=True))
    fields["candidate"] = Candidate.from_parameters(fields["candidate"])
    if fields["outcome"] is not None:
        fields["outcome"] = outcome_from_document(fields["outcome"])
    return TrialRecord(**fields)


def _read_trials(connection: Connection, query: Select[Any]) -> list[TrialRecord]:
    """Return the trials of a query. Raises ``StorageError`` where one of them is unreadable."""
    rows: Sequence[Row[Any]] = connection.execute(query).all()
    try:
        return [_trial_record(row) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the database holds a trial that this autotune cannot read ({error})",
            "upgrade autotune, or choose another file with --storage",
        ) from error


@dataclass(frozen=True)
class MeasuredTrial:
    """A completed trial, with the name that the driver gives its GPU."""

    id: str
    device_name: str
    candidate: Candidate
    outcome: Completed


def measured_trials(location: str, workload_fingerprint: str, lock_timeout_seconds: float) -> list[MeasuredTrial]:
    """Return the completed trials of a workload on GPUs of any kind, oldest first; none where the file is missing.

    The database is neither created nor upgraded. Unreadable trials are left out. Raises ``StorageError`` where it is
    locked, damaged or of another kind.
    """
    place = resolve_location(location)
    query = (
        select(TrialRow.id, TrialRow.candidate, TrialRow.outcome, EnvironmentRow.document)
        .join(WorkloadRow, WorkloadRow.id == TrialRow.workload_id)
        .join(EnvironmentRow, EnvironmentRow.id == TrialRow.environment_id)
        .where(
            WorkloadRow.fingerprint == workload_fingerprint, TrialRow.state == "completed", TrialRow.stage != "reused"
        )
        .order_by(TrialRow.started_at)
    )
    if place.path is not None and not place.path.is_file():
        return []
    with storage_errors(place.label):
        engine = build_engine(place, lock_timeout_seconds)
        try:
            with transaction(engine, writes=False) as connection:
                rows = connection.execute(query).all()
        finally:
            engine.dispose()
    trials = []
    for trial_id, candidate, outcome, environment in rows:
        with suppress(ValueError, KeyError, TypeError):
            completed = outcome_from_document(outcome)
            if isinstance(completed, Completed) and environment.get("device_kind") == "cuda":
                name = str(environment["device_name"])
                trials.append(MeasuredTrial(trial_id, name, Candidate.from_parameters(candidate), completed))
    return trials
