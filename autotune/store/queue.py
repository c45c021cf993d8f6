"""Keep the queue of a service: searches that wait or run, what they said, the agents that run them, and tokens.

A search that is handed to a service is a job. An agent claims it under a lease: a token and a time of expiry, which
heartbeats move on. Every write of an agent names the token, and a write whose lease was lost changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from sqlalchemy import Connection, Engine, Row, and_, delete, func, insert, literal, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.elements import ColumnElement

from autotune.core.candidate import Document
from autotune.core.errors import StorageError
from autotune.store.engine import storage_errors, transaction
from autotune.store.records import new_id, now
from autotune.store.tables import PLACE_IN_QUEUE, PLACES_PER_PRIORITY, AgentRow, JobEventRow, JobRow, TokenRow
from autotune.store.turns import Turns

JobState = Literal["queued", "running", "finished", "failed", "cancelled"]
Role = Literal["read", "run"]
ENDED: tuple[JobState, ...] = ("finished", "failed", "cancelled")
JOB_STATES: tuple[JobState, ...] = get_args(JobState)

LEASE_SECONDS = 30.0
"""How long an agent may be silent until its job goes back to the queue."""
# Threads of one process that write to a server at a time, fewer than it has connections. Of fifty threads that claimed
# and ended jobs on two busy cores, a claim took 58 ms in the median without this limit, and 18 ms with it.
_WRITERS_TO_A_SERVER = 8
MOST_ATTEMPTS = 3
"""A job whose agents were lost so often has failed: it may be what ends them."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What an agent must have to run a job; ``None`` leaves it open."""

    device_kind: str | None = None
    gpu: str | None = None
    """A part of the GPU's name, in lower case."""
    memory_bytes: int | None = None
    """Memory that the device has in all."""
    count: int = 1

    def describe(self) -> str:
        """Return what is needed in words: ``a GPU named h200 with 80 GB``."""
        if self.device_kind == "cpu":
            return "a CPU"
        kind = "GPU" if self.device_kind == "cuda" or self.gpu else "device"
        words = f"{self.count} {kind}s" if self.count > 1 else f"a {kind}"
        words += f" named {self.gpu}" if self.gpu else ""
        return words + (f" with {self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else "")


@dataclass(frozen=True, slots=True)
class Offer:
    """What an agent has."""

    device_kind: str
    device_name: str
    memory_bytes: int
    count: int = 1

    def meets(self, needs: Needs) -> bool:
        """Return whether an agent that offers this may run a job with these needs; the claim asks the same in SQL."""
        return (
            needs.device_kind in (None, self.device_kind)
            and (needs.gpu is None or needs.gpu in self.device_name.lower())
            and (needs.memory_bytes or 0) <= self.memory_bytes
            and needs.count <= self.count
        )


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A search that was handed to the service."""

    number: int
    """Counts up over all jobs; jobs of one priority run in its order."""
    id: str
    study: str
    request: Document
    needs: Needs
    priority: int
    state: JobState
    is_cancel_asked: bool
    attempts: int
    owner: str | None
    """The agent that runs it, or ran it last."""
    lease_token: str | None
    lease_expires_at: datetime | None
    problem: Document | None
    """Why it failed: an exit code, a message and a hint, as on the command line."""
    status: Document | None
    """What runs now."""
    events: int
    """How many events it has."""
    submitted_by: str
    submitted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job; ``number`` counts from 1 for each job."""

    number: int
    kind: str
    document: Document
    created_at: datetime


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """A process that runs jobs on one device of one machine."""

    id: str
    name: str
    host: str
    version: str
    device: Document
    started_at: datetime
    heartbeat_at: datetime
    gone_at: datetime | None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A bearer token, of which only the digest is kept."""

    id: str
    name: str
    role: Role
    created_at: datetime


class LeaseLostError(Exception):
    """The job went back to the queue, was cancelled, or belongs to another agent."""


Event = tuple[str, Document]


class Queue:
    """The jobs in an open database. Each method raises ``StorageError`` where that is locked, damaged or gone.

    ``clock`` tells the time by which leases expire.
    """

    def __init__(self, engine: Engine, label: str, clock: Callable[[], datetime] = now) -> None:
        self._engine = engine
        self._label = label
        self.clock = clock
        self._turns = Turns(1 if engine.dialect.name == "sqlite" else _WRITERS_TO_A_SERVER)

    # Submitting and looking

    def submit(
        self,
        study: str,
        request: Document,
        needs: Needs,
        *,
        priority: int = 0,
        submitted_by: str = "",
        idempotency_key: str | None = None,
        job_id: str | None = None,
    ) -> tuple[JobRecord, bool]:
        """Add a job; return it and whether it is new: one of the same ``idempotency_key`` is returned as it is."""
        job_id = job_id or new_id()
        values = {
            "id": job_id,
            "study": study,
            "request": request,
            "needs_kind": needs.device_kind,
            "needs_gpu": needs.gpu,
            "needs_memory_bytes": needs.memory_bytes,
            "needs_count": needs.count,
            "priority": priority,
            "state": "queued",
            "is_cancel_asked": False,
            "attempts": 0,
            "events": 1,
            "submitted_by": submitted_by,
            "submitted_at": self.clock(),
            "idempotency_key": idempotency_key,
        }
        try:
            with self._transaction(writes=True) as connection:
                known = self._with_key(connection, idempotency_key)
                if known is not None:
                    return known, False
                connection.execute(insert(JobRow).values(**values))
                self._insert_events(connection, job_id, 1, [("state", {"state": "queued"})])
                return _job(connection.execute(_JOBS.where(JobRow.id == job_id)).one()), True
        except StorageError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            # Where writers do not wait for each other, another may have come between.
            with self._transaction() as connection:
                known = self._with_key(connection, idempotency_key)
            if known is None:
                raise
            return known, False

    @staticmethod
    def _with_key(connection: Connection, idempotency_key: str | None) -> JobRecord | None:
        if idempotency_key is None:
            return None
        row = connection.execute(_JOBS.where(JobRow.idempotency_key == idempotency_key)).first()
        return None if row is None else _job(row)

    def job(self, job_id: str) -> JobRecord | None:
        """Return the job of this id, or the latest one of a study of this name."""
        query = _JOBS.where(or_(JobRow.id == job_id, JobRow.study == job_id)).order_by(JobRow.number.desc())
        with self._transaction() as connection:
            row = connection.execute(query.limit(1)).first()
        return None if row is None else _job(row)

    def jobs(
        self,
        *,
        states: Sequence[JobState] = (),
        study: str | None = None,
        model: str | None = None,
        before: int | None = None,
        most: int = 100,
    ) -> list[JobRecord]:
        """Return jobs, the newest first; those below the number ``before``."""
        query = _JOBS.order_by(JobRow.number.desc()).limit(most)
        if states:
            query = query.where(JobRow.state.in_(states))
        if study is not None:
            query = query.where(JobRow.study == study)
        if model is not None:
            query = query.where(JobRow.request["model"].as_string() == model)
        if before is not None:
            query = query.where(JobRow.number < before)
        with self._transaction() as connection:
            return [_job(row) for row in connection.execute(query)]

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in each state."""
        query = select(JobRow.state, func.count()).group_by(JobRow.state)
        with self._transaction() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def ahead_of(self, job: JobRecord) -> int:
        """Return how many queued jobs come before this one."""
        place = JobRow.number - PLACES_PER_PRIORITY * JobRow.priority
        own = job.number - PLACES_PER_PRIORITY * job.priority
        query = select(func.count()).select_from(JobRow).where(JobRow.state == "queued", place < own)
        with self._transaction() as connection:
            return int(connection.execute(query).scalar_one())

    def events(self, job_id: str, after: int = 0, most: int = 1000) -> list[JobEvent]:
        """Return what happened to a job since the event number ``after``, in order."""
        query = (
            select(JobEventRow.number, JobEventRow.kind, JobEventRow.document, JobEventRow.created_at)
            .where(JobEventRow.job_id == job_id, JobEventRow.number > after)
            .order_by(JobEventRow.number)
            .limit(most)
        )
        with self._transaction() as connection:
            return [JobEvent(*row) for row in connection.execute(query)]

    def cancel(self, job_id: str) -> JobRecord | None:
        """Cancel a job: at once where it is queued, through its agent where it runs; return it as it is then."""
        moment = self.clock()
        with self._transaction(writes=True) as connection:
            queued = and_(JobRow.id == job_id, JobRow.state == "queued")
            ended = {"state": "cancelled", "is_cancel_asked": True, "ended_at": moment, "events": JobRow.events + 1}
            row = connection.execute(update(JobRow).where(queued).values(**ended).returning(JobRow.events)).first()
            if row is not None:
                self._insert_events(connection, job_id, row[0], [("state", {"state": "cancelled"})])
            running = and_(JobRow.id == job_id, JobRow.state == "running")
            connection.execute(update(JobRow).where(running).values(is_cancel_asked=True))
            found = connection.execute(_JOBS.where(JobRow.id == job_id)).first()
        return None if found is None else _job(found)

    # Agents at work

    def claim(self, agent: str, offer: Offer, lease_seconds: float = LEASE_SECONDS) -> JobRecord | None:
        """Give the next job that fits to an agent, under a new lease; ``None`` where none waits."""
        moment, token = self.clock(), new_id()
        waiting = (
            select(JobRow.number)
            .where(JobRow.state == "queued", _fits(offer))
            .order_by(PLACE_IN_QUEUE)
            .limit(1)
            # Ignored by SQLite, where one writer at a time is in.
            .with_for_update(skip_locked=True)
        )
        taken = {
            "state": "running",
            "owner": agent,
            "lease_token": token,
            "lease_expires_at": moment + timedelta(seconds=lease_seconds),
            "attempts": JobRow.attempts + 1,
            "started_at": func.coalesce(JobRow.started_at, moment),
            "events": JobRow.events + 1,
        }
        statement = (
            update(JobRow)
            .where(JobRow.number == waiting.scalar_subquery())
            .values(**taken)
            .returning(*JobRow.__table__.columns)
        )
        # Most agents find nothing most of the time, and that needs no lock. On a server the claim itself takes none.
        if self._engine.dialect.name == "sqlite":
            with self._transaction() as connection:
                if connection.execute(waiting).first() is None:
                    return None
        # Before other writes: a device is idle until its agent has a job.
        with self._transaction(writes=True, is_urgent=True) as connection:
            row = connection.execute(statement).first()
            if row is None:
                return None
            job = _job(row)
            self._insert_events(connection, job.id, job.events, [("state", {"state": "running", "agent": agent})])
        return job

    def renew(self, job_id: str, token: str, status: Document | None = None) -> bool:
        """Move the expiry of a lease on; return whether the job is to be cancelled.

        ``status`` is what runs now. ``LeaseLostError`` where the lease is lost.
        """
        expiry = self.clock() + timedelta(seconds=LEASE_SECONDS)
        values: dict[str, Any] = {"lease_expires_at": expiry}
        if status is not None:
            values["status"] = status
        statement = update(JobRow).where(_held(job_id, token)).values(**values).returning(JobRow.is_cancel_asked)
        with self._transaction(writes=True) as connection:
            row = connection.execute(statement).first()
        if row is None:
            raise LeaseLostError(job_id)
        return bool(row[0])

    @contextlib.contextmanager
    def writing(self, job_id: str, token: str, events: Sequence[Event], **changes: Any) -> Iterator[Connection]:
        """Write events and ``changes`` of a job in one transaction, to which the block may add.

        ``LeaseLostError`` where the lease is lost; nothing is written then.
        """
        expiry = self.clock() + timedelta(seconds=LEASE_SECONDS)
        values = {"lease_expires_at": expiry, **changes, "events": JobRow.events + len(events)}
        statement = update(JobRow).where(_held(job_id, token)).values(**values).returning(JobRow.events)
        with self._transaction(writes=True) as connection:
            row = connection.execute(statement).first()
            if row is None:
                raise LeaseLostError(job_id)
            self._insert_events(connection, job_id, row[0], events)
            yield connection

    def add_events(self, job_id: str, token: str, events: Sequence[Event]) -> None:
        """Record what an agent says of its job; ``LeaseLostError`` where the lease is lost."""
        with self.writing(job_id, token, events):
            pass

    def end(self, job_id: str, token: str, state: JobState, problem: Document | None = None) -> None:
        """Record the end of a job; ``LeaseLostError`` where the lease is lost."""
        event = ("state", {"state": state, **({"problem": problem} if problem else {})})
        ended = {"state": state, "problem": problem, "ended_at": self.clock(), "lease_token": None, "status": None}
        with self.writing(job_id, token, [event], **ended, lease_expires_at=None):
            pass

    def put_back(self, job_id: str, token: str, why: str) -> None:
        """Put a job back into the queue, where its agent ends; ``LeaseLostError`` where the lease is lost."""
        event = ("state", {"state": "queued", "why": why})
        waiting = {"state": "queued", "attempts": JobRow.attempts - 1, "lease_token": None, "status": None}
        with self.writing(job_id, token, [event], **waiting, lease_expires_at=None):
            pass

    def sweep(self) -> list[tuple[str, str]]:
        """Put the jobs of agents that fell silent back into the queue; return their ids, each with its state now.

        A job that is to be cancelled is cancelled then; one that lost its agent too often has failed.
        """
        moment = self.clock()
        silent = and_(JobRow.state == "running", JobRow.lease_expires_at < moment)
        with self._transaction() as connection:
            if connection.execute(select(JobRow.id).where(silent).limit(1)).first() is None:
                return []
        found = []
        with self._transaction(writes=True) as connection:
            # In one order, so that two that sweep at once do not wait for each other's rows.
            for job in [_job(row) for row in connection.execute(_JOBS.where(silent).order_by(JobRow.number))]:
                values: dict[str, Any] = {"lease_token": None, "lease_expires_at": None, "status": None}
                event: Document = {"state": "queued", "why": "its agent fell silent"}
                if job.is_cancel_asked:
                    event = {"state": "cancelled"}
                elif job.attempts >= MOST_ATTEMPTS:
                    problem = {
                        "exit_code": 8,
                        "message": f"{job.attempts} agents were lost while they ran this search",
                        "hint": "see their logs; submit it again once the reason is known",
                    }
                    event = {"state": "failed", "problem": problem}
                    values["problem"] = problem
                if event["state"] != "queued":
                    values["ended_at"] = moment
                values |= {"state": event["state"], "events": JobRow.events + 1}
                still = and_(JobRow.id == job.id, JobRow.lease_token == job.lease_token)
                row = connection.execute(
                    update(JobRow).where(still, silent).values(**values).returning(JobRow.events)
                ).first()
                if row is not None:
                    self._insert_events(connection, job.id, row[0], [("state", event)])
                    found.append((job.id, str(event["state"])))
        return found

    def grant_grace(self) -> None:
        """Renew every lease: while a service was down, no heartbeat could reach it."""
        expiry = self.clock() + timedelta(seconds=LEASE_SECONDS)
        with self._transaction(writes=True) as connection:
            connection.execute(update(JobRow).where(JobRow.state == "running").values(lease_expires_at=expiry))

    # Agents

    def register(self, agent: AgentRecord) -> None:
        """Record an agent that has started."""
        with self._transaction(writes=True) as connection:
            connection.execute(insert(AgentRow).values(**_fields(agent)))

    def saw_agent(self, agent_id: str, *, leaves: bool = False) -> bool:
        """Record a heartbeat of an agent, or that it ended; return whether it is known."""
        moment = self.clock()
        values = {"heartbeat_at": moment, "gone_at": moment if leaves else None}
        with self._transaction(writes=True) as connection:
            return connection.execute(update(AgentRow).where(AgentRow.id == agent_id).values(**values)).rowcount > 0

    def agents(self, seen_since: datetime | None = None) -> list[AgentRecord]:
        """Return the agents that have not ended and were heard of since then, the newest first."""
        query = select(*(getattr(AgentRow, name) for name in _AGENT_FIELDS)).where(AgentRow.gone_at.is_(None))
        if seen_since is not None:
            query = query.where(AgentRow.heartbeat_at >= seen_since)
        with self._transaction() as connection:
            return [AgentRecord(*row) for row in connection.execute(query.order_by(AgentRow.started_at.desc()))]

    # Tokens

    def add_token(self, name: str, digest: str, role: Role) -> TokenRecord:
        """Record a token by its digest."""
        token = TokenRecord(new_id(), name, role, self.clock())
        with self._transaction(writes=True) as connection:
            connection.execute(insert(TokenRow).values(**_fields(token), digest=digest))
        return token

    def token(self, digest: str) -> TokenRecord | None:
        """Return the token of this digest."""
        query = select(TokenRow.id, TokenRow.name, TokenRow.role, TokenRow.created_at).where(TokenRow.digest == digest)
        with self._transaction() as connection:
            row = connection.execute(query).first()
        return None if row is None else _token(row)

    def tokens(self) -> list[TokenRecord]:
        """Return every token, the oldest first."""
        query = select(TokenRow.id, TokenRow.name, TokenRow.role, TokenRow.created_at).order_by(TokenRow.created_at)
        with self._transaction() as connection:
            return [_token(row) for row in connection.execute(query)]

    def remove_token(self, name: str) -> bool:
        """Remove the tokens of this name; return whether there was one."""
        with self._transaction(writes=True) as connection:
            return connection.execute(delete(TokenRow).where(TokenRow.name == name)).rowcount > 0

    # Within

    @contextlib.contextmanager
    def _transaction(self, *, writes: bool = False, is_urgent: bool = False) -> Iterator[Connection]:
        turn = self._turns.take(is_urgent=is_urgent) if writes else contextlib.nullcontext()
        with turn, storage_errors(self._label), transaction(self._engine, writes=writes) as connection:
            yield connection

    def _insert_events(self, connection: Connection, job_id: str, last: int, events: Sequence[Event]) -> None:
        """Insert events that take the numbers up to ``last``."""
        if not events:
            return
        moment = self.clock()
        first = last - len(events) + 1
        rows = [
            {"job_id": job_id, "number": first + place, "kind": kind, "document": document, "created_at": moment}
            for place, (kind, document) in enumerate(events)
        ]
        connection.execute(insert(JobEventRow), rows)


_JOB_FIELDS = tuple(field.name for field in dataclasses.fields(JobRecord))
_AGENT_FIELDS = tuple(field.name for field in dataclasses.fields(AgentRecord))
_JOBS = select(JobRow.__table__)


def _fits(offer: Offer) -> ColumnElement[bool]:
    """Whether a job's needs are met by an offer, as ``Offer.meets`` says."""
    name = literal(offer.device_name.lower())
    return and_(
        or_(JobRow.needs_kind.is_(None), JobRow.needs_kind == offer.device_kind),
        or_(JobRow.needs_gpu.is_(None), name.contains(JobRow.needs_gpu)),
        or_(JobRow.needs_memory_bytes.is_(None), JobRow.needs_memory_bytes <= offer.memory_bytes),
        JobRow.needs_count <= offer.count,
    )


def _held(job_id: str, token: str) -> ColumnElement[bool]:
    """Whether the job runs under the lease with this token. An expired one holds until another agent claims the job."""
    return and_(JobRow.id == job_id, JobRow.state == "running", JobRow.lease_token == token)


def _job(row: Row[Any]) -> JobRecord:
    found = row._mapping
    needs = Needs(found["needs_kind"], found["needs_gpu"], found["needs_memory_bytes"], found["needs_count"])
    return JobRecord(needs=needs, **{name: found[name] for name in _JOB_FIELDS if name != "needs"})


def _token(row: Any) -> TokenRecord:
    return TokenRecord(row.id, row.name, row.role, row.created_at)


def _fields(record: AgentRecord | TokenRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
