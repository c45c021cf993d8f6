"""Keep the queue of a service: waiting and running searches, their events, the agents that run them, and tokens.

A search that is handed to a service is a job. An agent claims it under a lease: a token and a time of expiry, which
heartbeats move on. Every write of an agent names the token, and a write whose lease was lost changes nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    Row,
    String,
    Text,
    Update,
    and_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)  # fmt: skip
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql.elements import ColumnElement

from autotune.core.candidate import Document
from autotune.core.errors import StorageError
from autotune.store.engine import storage_errors, transaction
from autotune.store.priority_semaphore import PrioritySemaphore
from autotune.store.records import new_id, now
from autotune.store.strict_json import write_strict_json
from autotune.store.tables import PLACE_IN_QUEUE, PLACES_PER_PRIORITY, AgentRow, JobEventRow, JobRow, TokenRow

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


_JOB, _EVENT, _AGENT, _TOKEN = (
    row.metadata.tables[row.__tablename__] for row in (JobRow, JobEventRow, AgentRow, TokenRow)
)


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
        self._writers = PrioritySemaphore(1 if engine.dialect.name == "sqlite" else _WRITERS_TO_A_SERVER)
        # On a server a claim that finds nothing takes no lock. In a file it would keep all others from writing.
        self._looks_first = self._is_file = engine.dialect.name == "sqlite"

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
                job = _job(connection.execute(_ADD_JOB, values).one())
                self._insert_events(connection, job_id, 1, [("state", {"state": "queued"})])
                return job, True
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
        row = connection.execute(_JOBS.where(_JOB.c.idempotency_key == idempotency_key)).first()
        return None if row is None else _job(row)

    def job(self, job_id: str) -> JobRecord | None:
        """Return the job of this id, or the latest one of a study of this name."""
        if "\0" in job_id:
            # No job's name; a PostgreSQL server refuses to look for it.
            return None
        with self._transaction(is_single=True) as connection:
            row = connection.execute(_JOB_NAMED, {"name": job_id}).first()
        return None if row is None else _job(row)

    def jobs(
        self,
        *,
        states: Sequence[JobState] = (),
        study: str | None = None,
        request: Document | None = None,
        before: int | None = None,
        most: int = 100,
    ) -> list[JobRecord]:
        """Return jobs, the newest first; those below the number ``before``, and those with just this ``request``."""
        if study is not None and "\0" in study:
            return []
        query = _JOBS.order_by(_JOB.c.number.desc()).limit(most)
        if study is not None:
            query = query.where(_JOB.c.study == study)
        if request is not None:
            query = query.where(cast(_JOB.c.request, Text) == write_strict_json(request))
        if before is not None:
            query = query.where(_JOB.c.number < before)
        # State by state, in the order of their index; with IN all jobs of the states would be read and sorted.
        queries = [query.where(_JOB.c.state == state) for state in states] or [query]
        with self._transaction(is_single=len(queries) == 1) as connection:
            found = [_job(row) for each in queries for row in connection.execute(each)]
        return sorted(found, key=lambda job: -job.number)[:most]

    def next_jobs(self, most: int) -> list[JobRecord]:
        """Return the queued jobs that are claimed next, in the order of their turns."""
        with self._transaction(is_single=True) as connection:
            return [_job(row) for row in connection.execute(_IN_TURN, {"most": most})]

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in each state."""
        query = select(_JOB.c.state, func.count()).group_by(_JOB.c.state)
        with self._transaction(is_single=True) as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def count_queued(self) -> int:
        """Return how many jobs wait."""
        with self._transaction(is_single=True) as connection:
            return int(connection.execute(_COUNT_QUEUED).scalar_one())

    def ahead_of(self, jobs: Sequence[JobRecord]) -> dict[str, int]:
        """Return how many queued jobs come before each of these, by their ids."""
        if not jobs:
            return {}
        places = {job.id: job.number - PLACES_PER_PRIORITY * job.priority for job in jobs}
        first, last = min(places.values()), max(places.values())
        with self._transaction() as connection:
            before = int(connection.execute(_COUNT_BEFORE, {"place": first}).scalar_one())
            between = [row[0] for row in connection.execute(_PLACES_BETWEEN, {"first": first, "last": last})]
        return {job_id: before + bisect.bisect_left(between, place) for job_id, place in places.items()}

    def events(self, job_id: str, after: int = 0, most: int = 1000) -> list[JobEvent]:
        """Return what happened to a job since the event number ``after``, in order."""
        asked = {"job_id": job_id, "after": after, "most": most}
        with self._transaction(is_single=True) as connection:
            return [JobEvent(*row) for row in connection.execute(_EVENTS, asked)]

    def cancel(self, job_id: str) -> JobRecord | None:
        """Cancel a job: at once where it is queued, through its agent where it runs; return it as it is then."""
        moment = self.clock()
        with self._transaction(writes=True) as connection:
            queued = and_(_JOB.c.id == job_id, _JOB.c.state == "queued")
            ended = {"state": "cancelled", "is_cancel_asked": True, "ended_at": moment, "events": _JOB.c.events + 1}
            row = connection.execute(update(_JOB).where(queued).values(**ended).returning(_JOB.c.events)).first()
            if row is not None:
                self._insert_events(connection, job_id, row[0], [("state", {"state": "cancelled"})])
            running = and_(_JOB.c.id == job_id, _JOB.c.state == "running")
            connection.execute(update(_JOB).where(running).values(is_cancel_asked=True))
            found = connection.execute(_JOBS.where(_JOB.c.id == job_id)).first()
        return None if found is None else _job(found)

    # Agents at work

    def claim(self, agent: str, offer: Offer, lease_seconds: float = LEASE_SECONDS) -> JobRecord | None:
        """Give the next job that fits to an agent, under a new lease; ``None`` where none waits."""
        moment = self.clock()
        offered = {
            "device_kind": offer.device_kind,
            "device_name": offer.device_name.lower(),
            "memory_bytes": offer.memory_bytes,
            "device_count": offer.count,
        }
        taken = {
            "agent": agent,
            "new_token": new_id(),
            "expiry": moment + timedelta(seconds=lease_seconds),
            "moment": moment,
        }
        # Most agents find nothing most of the time, and that needs no lock; as long as they find something, a look
        # before each claim would be wasted.
        if self._looks_first:
            with self._transaction() as connection:
                if connection.execute(_NEXT, offered).first() is None:
                    return None
        # Before other writes: a device is idle until its agent has a job.
        with self._transaction(writes=True, is_urgent=True) as connection:
            row = connection.execute(_TAKE_NEXT, {**offered, **taken}).first()
            self._looks_first = self._is_file and row is None
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
        given: dict[str, Any] = {"job_id": job_id, "token": token, "expiry": expiry}
        with self._transaction(writes=True, is_single=True) as connection:
            if status is None:
                row = connection.execute(_RENEW, given).first()
            else:
                row = connection.execute(_RENEW_AND_SHOW, {**given, "shown": status}).first()
        if row is None:
            raise LeaseLostError(job_id)
        return bool(row[0])

    @contextlib.contextmanager
    def writing(self, job_id: str, token: str, events: Sequence[Event], **changes: Any) -> Iterator[Connection]:
        """Write events and ``changes`` of a job in one transaction, to which the block may add.

        ``LeaseLostError`` where the lease is lost; nothing is written then.
        """
        expiry = self.clock() + timedelta(seconds=LEASE_SECONDS)
        values = {"lease_expires_at": expiry, **changes}
        given = {"job_id": job_id, "token": token, "added": len(events)}
        given |= {f"new_{name}": value for name, value in values.items()}
        with self._transaction(writes=True) as connection:
            row = connection.execute(_write_held(tuple(values)), given).first()
            if row is None:
                raise LeaseLostError(job_id)
            self._insert_events(connection, job_id, row[0], events)
            yield connection

    def end(self, job_id: str, token: str, state: JobState, problem: Document | None = None) -> None:
        """Record the end of a job; ``LeaseLostError`` where the lease is lost."""
        event = ("state", {"state": state, **({"problem": problem} if problem else {})})
        ended = {"state": state, "problem": problem, "ended_at": self.clock(), "lease_token": None, "status": None}
        with self.writing(job_id, token, [event], **ended, lease_expires_at=None):
            pass

    def put_back(self, job_id: str, token: str, why: str) -> None:
        """Put a job back into the queue, where its agent ends; ``LeaseLostError`` where the lease is lost."""
        event = ("state", {"state": "queued", "why": why})
        waiting = {"state": "queued", "lease_token": None, "status": None, "lease_expires_at": None}
        with self.writing(job_id, token, [event], **waiting) as connection:
            # It was not lost by the agent, which would count against the job.
            connection.execute(update(_JOB).where(_JOB.c.id == job_id).values(attempts=_JOB.c.attempts - 1))

    def sweep(self) -> list[tuple[str, str]]:
        """Put the jobs of agents that fell silent back into the queue; return their ids, each with its state now.

        A job that is to be cancelled is cancelled then; one that lost its agent too often has failed.
        """
        moment = self.clock()
        silent = and_(_JOB.c.state == "running", _JOB.c.lease_expires_at < moment)
        with self._transaction(is_single=True) as connection:
            if connection.execute(select(_JOB.c.id).where(silent).limit(1)).first() is None:
                return []
        found = []
        with self._transaction(writes=True) as connection:
            # In one order, so that two that sweep at once do not wait for each other's rows.
            for job in [_job(row) for row in connection.execute(_JOBS.where(silent).order_by(_JOB.c.number))]:
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
                values |= {"state": event["state"], "events": _JOB.c.events + 1}
                still = and_(_JOB.c.id == job.id, _JOB.c.lease_token == job.lease_token)
                row = connection.execute(
                    update(_JOB).where(still, silent).values(**values).returning(_JOB.c.events)
                ).first()
                if row is not None:
                    self._insert_events(connection, job.id, row[0], [("state", event)])
                    found.append((job.id, str(event["state"])))
        return found

    def grant_grace(self) -> None:
        """Renew every lease: while a service was down, no heartbeat could reach it."""
        expiry = self.clock() + timedelta(seconds=LEASE_SECONDS)
        with self._transaction(writes=True, is_single=True) as connection:
            connection.execute(update(_JOB).where(_JOB.c.state == "running").values(lease_expires_at=expiry))

    # Agents

    def register(self, agent: AgentRecord) -> None:
        """Record an agent that has started."""
        with self._transaction(writes=True, is_single=True) as connection:
            connection.execute(insert(_AGENT).values(**_fields(agent)))

    def saw_agent(self, agent_id: str, *, leaves: bool = False) -> bool:
        """Record a heartbeat of an agent, or that it ended; return whether it is known."""
        moment = self.clock()
        values = {"heartbeat_at": moment, "gone_at": moment if leaves else None}
        with self._transaction(writes=True, is_single=True) as connection:
            return connection.execute(update(_AGENT).where(_AGENT.c.id == agent_id).values(**values)).rowcount > 0

    def agents(self, seen_since: datetime | None = None) -> list[AgentRecord]:
        """Return the agents that have not ended and were heard of since then, the newest first."""
        query = select(*(_AGENT.c[name] for name in _AGENT_FIELDS)).where(_AGENT.c.gone_at.is_(None))
        if seen_since is not None:
            query = query.where(_AGENT.c.heartbeat_at >= seen_since)
        with self._transaction(is_single=True) as connection:
            return [AgentRecord(*row) for row in connection.execute(query.order_by(_AGENT.c.started_at.desc()))]

    # Tokens

    def add_token(self, name: str, digest: str, role: Role) -> TokenRecord:
        """Record a token by its digest."""
        token = TokenRecord(new_id(), name, role, self.clock())
        with self._transaction(writes=True, is_single=True) as connection:
            connection.execute(insert(_TOKEN).values(**_fields(token), digest=digest))
        return token

    def token(self, digest: str) -> TokenRecord | None:
        """Return the token of this digest."""
        with self._transaction(is_single=True) as connection:
            row = connection.execute(_TOKENS.where(_TOKEN.c.digest == digest)).first()
        return None if row is None else _token(row)

    def tokens(self) -> list[TokenRecord]:
        """Return every token, the oldest first."""
        with self._transaction(is_single=True) as connection:
            return [_token(row) for row in connection.execute(_TOKENS.order_by(_TOKEN.c.created_at))]

    def remove_token(self, name: str) -> bool:
        """Remove the tokens of this name; return whether there was one."""
        with self._transaction(writes=True, is_single=True) as connection:
            return connection.execute(delete(_TOKEN).where(_TOKEN.c.name == name)).rowcount > 0

    # Within

    @contextlib.contextmanager
    def _transaction(
        self, *, writes: bool = False, is_urgent: bool = False, is_single: bool = False
    ) -> Iterator[Connection]:
        place = self._writers.take(is_urgent=is_urgent) if writes else contextlib.nullcontext()
        told = transaction(self._engine, writes=writes, is_single=is_single)
        with place, storage_errors(self._label), told as connection:
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
        connection.execute(_ADD_EVENTS, rows)


_JOB_FIELDS = tuple(field.name for field in dataclasses.fields(JobRecord))
_AGENT_FIELDS = tuple(field.name for field in dataclasses.fields(AgentRecord))


def _held(job_id: Any, token: Any) -> ColumnElement[bool]:
    """Select a job that runs under the lease with this token.

    An expired lease holds until another agent claims the job.
    """
    return and_(_JOB.c.id == job_id, _JOB.c.state == "running", _JOB.c.lease_token == token)


# Statements that run with every request are made once: to make one takes as long as to run it.
_JOBS = select(_JOB)
_JOB_NAMED = (
    _JOBS.where(or_(_JOB.c.id == bindparam("name"), _JOB.c.study == bindparam("name")))
    .order_by(_JOB.c.number.desc())
    .limit(1)
)
_place: ColumnElement[int] = literal_column(PLACE_IN_QUEUE.text, Integer)
_QUEUED = _JOB.c.state == literal_column("'queued'")
_IN_TURN = _JOBS.where(_QUEUED).order_by(_place).limit(bindparam("most", type_=Integer))
_COUNT_QUEUED = select(func.count()).select_from(_JOB).where(_QUEUED)
_COUNT_BEFORE = _COUNT_QUEUED.where(bindparam("place", type_=Integer) > _place)
_PLACES_BETWEEN = (
    select(_place)
    .where(_QUEUED, _place >= bindparam("first", type_=Integer), _place <= bindparam("last", type_=Integer))
    .order_by(_place)
)
# Whether a job's needs are met by an offer, as ``Offer.meets`` says.
_FITS = and_(
    or_(_JOB.c.needs_kind.is_(None), _JOB.c.needs_kind == bindparam("device_kind")),
    or_(_JOB.c.needs_gpu.is_(None), bindparam("device_name", type_=String).contains(_JOB.c.needs_gpu)),
    or_(_JOB.c.needs_memory_bytes.is_(None), _JOB.c.needs_memory_bytes <= bindparam("memory_bytes")),
    _JOB.c.needs_count <= bindparam("device_count"),
)
_NEXT = (
    select(_JOB.c.number)
    .where(_QUEUED, _FITS)
    .order_by(_place)
    .limit(1)
    # Ignored by SQLite, where one writer at a time is in.
    .with_for_update(skip_locked=True)
)
_TAKE_NEXT = (
    update(_JOB)
    .where(_JOB.c.number == _NEXT.scalar_subquery())
    .values(
        state="running",
        owner=bindparam("agent"),
        lease_token=bindparam("new_token"),
        lease_expires_at=bindparam("expiry"),
        attempts=_JOB.c.attempts + 1,
        started_at=func.coalesce(_JOB.c.started_at, bindparam("moment", type_=_JOB.c.started_at.type)),
        events=_JOB.c.events + 1,
    )
    .returning(*_JOB.c)
)
_RENEW = (
    update(_JOB)
    .where(_held(bindparam("job_id"), bindparam("token")))
    .values(lease_expires_at=bindparam("expiry"))
    .returning(_JOB.c.is_cancel_asked)
)
_RENEW_AND_SHOW = _RENEW.values(status=bindparam("shown"))
_EVENTS = (
    select(_EVENT.c.number, _EVENT.c.kind, _EVENT.c.document, _EVENT.c.created_at)
    .where(_EVENT.c.job_id == bindparam("job_id"), _EVENT.c.number > bindparam("after"))
    .order_by(_EVENT.c.number)
    .limit(bindparam("most", type_=Integer))
)
_ADD_EVENTS = insert(_EVENT)
_ADD_JOB = insert(_JOB).returning(*_JOB.c)
_TOKENS = select(_TOKEN.c.id, _TOKEN.c.name, _TOKEN.c.role, _TOKEN.c.created_at)


@functools.cache
def _write_held(names: tuple[str, ...]) -> Update:
    """Return the statement that writes these columns of a job whose lease is held, and counts its new events."""
    values = {name: bindparam(f"new_{name}", type_=_JOB.c[name].type) for name in names}
    statement = update(_JOB).where(_held(bindparam("job_id"), bindparam("token"))).values(**values)
    return statement.values(events=_JOB.c.events + bindparam("added", type_=Integer)).returning(_JOB.c.events)


def _job(row: Row[Any]) -> JobRecord:
    found = row._mapping
    needs = Needs(found["needs_kind"], found["needs_gpu"], found["needs_memory_bytes"], found["needs_count"])
    return JobRecord(needs=needs, **{name: found[name] for name in _JOB_FIELDS if name != "needs"})


def _token(row: Any) -> TokenRecord:
    return TokenRecord(row.id, row.name, row.role, row.created_at)


def _fields(record: AgentRecord | TokenRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
