"""Keep the queue of a service: jobs with their states, attempts and events, and the tokens of its clients.

A search that is handed to a service is a job. The service starts it on free devices, which is an attempt. Attempts of
a job count up and their number is never used again: every write names its attempt, and one of a former attempt is
refused.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    Row,
    Select,
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
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError
from autotune.store.engine import storage_errors, transaction, write_strict_json
from autotune.store.records import new_id, now
from autotune.store.tables import PLACE_IN_QUEUE, PLACES_PER_PRIORITY, JobEventRow, JobRow, TokenRow

JobState = Literal["queued", "running", "finished", "failed", "cancelled"]
Role = Literal["read", "run", "admin"]
"""``read`` looks, ``run`` submits and changes its own, ``admin`` changes everything."""
ENDED: tuple[JobState, ...] = ("finished", "failed", "cancelled")
JOB_STATES: tuple[JobState, ...] = get_args(JobState)

# Threads of a process that write to a server at a time, fewer than its connections. Of fifty threads that started
# and ended jobs on two busy cores, a start took 58 ms in the median without this limit, and 18 ms with it.
_WRITERS_TO_A_SERVER = 8
JobOrder = Literal["submitted", "study", "owner", "state", "device", "batch", "took"]
"""What jobs are sorted by."""
# 32 random bytes cannot be guessed, so their digest needs no salt and no slow hash.
_TOKEN_BYTES = 32
MOST_LOSSES = 3
"""A job fails after so many attempts whose process or node was lost: the job itself may be the cause."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The devices that a job needs; ``None`` stands for any."""

    device_kind: str | None = None
    gpu: str | None = None
    """A part of the GPU's name, in lower case."""
    memory_bytes: int | None = None
    """Least total memory of each device."""
    count: int = 1

    def describe(self) -> str:
        """Return the needs in words: ``a GPU named h200 with 80.0 GiB``."""
        if self.device_kind == "cpu":
            return "a CPU"
        kind = "GPU" if self.device_kind == "cuda" or self.gpu else "device"
        words = f"{self.count} {kind}s" if self.count > 1 else f"a {kind}"
        if self.gpu:
            words += f" named {self.gpu}"
        if self.memory_bytes:
            words += f" with {self.memory_bytes / 2**30:.1f} GiB"
        return words


@dataclass(frozen=True, slots=True)
class Offer:
    """Free devices of a machine, equal in kind, name and memory, for which the queue has to choose a job."""

    device_kind: str
    device_name: str
    memory_bytes: int
    count: int = 1

    def meets(self, needs: Needs) -> bool:
        """Return whether these devices meet a job's needs, by the same rules as ``_FITS`` in SQL."""
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
    """How often it was started, which is also the number of the latest attempt."""
    losses: int
    """How many of its attempts ended because their process or node was lost."""
    heard: int
    """The number of the last message from the running attempt whose content is recorded here."""
    device: Document | None
    """Where it runs, or ran last: a host and the devices there."""
    problem: Document | None
    """Why it failed: an exit code, a message and a hint, as on the command line."""
    status: Document | None
    """What it does now, as the running attempt last reported it."""
    events: int
    """How many events it has, which is also the number of the latest event."""
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
class TokenRecord:
    """A bearer token, of which only the digest is kept."""

    id: str
    name: str
    role: Role
    created_at: datetime

    @property
    def may_write(self) -> bool:
        """Whether the token allows writing."""
        return self.role != "read"


def digest_of(token: str) -> str:
    """Return the hash under which a token is stored."""
    return hashlib.sha256(token.encode()).hexdigest()


_JOB, _EVENT, _TOKEN = (row.metadata.tables[row.__tablename__] for row in (JobRow, JobEventRow, TokenRow))


class AttemptOverError(Exception):
    """An attempt no longer runs its job: the job has ended, is queued again, or is run by a later attempt."""


Event = tuple[str, Document]


class PrioritySemaphore:
    """Admits ``places`` threads at a time to write: urgent ones first, others in the order in which they asked.

    SQLite admits one writer, and who waits for its lock sleeps between tries; a thread that waits here is woken at
    once. A server admits many, but a process has a limited number of connections, which are given out in no order.
    """

    def __init__(self, places: int) -> None:
        self._changed = threading.Condition()
        self._free_places = places
        self._waiting: list[tuple[bool, int]] = []
        """A ticket for each waiting thread, sorted: whether it is not urgent, and a number that counts up."""
        self._ticket_numbers = itertools.count()

    @contextlib.contextmanager
    def take(self, *, is_urgent: bool = False) -> Iterator[None]:
        """Hold a place for the duration of the block, after waiting for it."""
        with self._changed:
            ticket = not is_urgent, next(self._ticket_numbers)
            bisect.insort(self._waiting, ticket)
            try:
                self._changed.wait_for(lambda: self._free_places and self._waiting[0] == ticket)
                self._free_places -= 1
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free_places += 1
                self._changed.notify_all()


class Queue:
    """The jobs in an open database. Methods raise ``StorageError`` where the database is locked, damaged or gone.

    ``clock`` returns the time to record.
    """

    def __init__(self, engine: Engine, label: str, clock: Callable[[], datetime] = now) -> None:
        self._engine = engine
        self._label = label
        self.clock = clock
        self._writers = PrioritySemaphore(1 if engine.dialect.name == "sqlite" else _WRITERS_TO_A_SERVER)

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
    ) -> tuple[JobRecord, bool]:
        """Add a job; return it and whether it is new.

        A client that submits again after a lost answer gives the same ``idempotency_key``: its first job is returned.
        """
        job_id = new_id()
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
            "events": 1,
            "submitted_by": submitted_by,
            "submitted_at": self.clock(),
            "idempotency_key": idempotency_key,
        }
        add = postgresql.insert(_JOB) if self._engine.dialect.name == "postgresql" else sqlite.insert(_JOB)
        add_if_new = add.on_conflict_do_nothing(index_elements=[_JOB.c.idempotency_key])
        with self._transaction(writes=True) as connection:
            row = connection.execute(add_if_new.returning(*_JOB.c), values).first()
            if row is None:
                known = connection.execute(_JOBS.where(_JOB.c.idempotency_key == idempotency_key)).one()
                return _record_of(known), False
            self._insert_events(connection, job_id, 1, [("state", {"state": "queued"})])
            return _record_of(row), True

    def job_with_key(self, idempotency_key: str) -> JobRecord | None:
        """Return the job that was submitted with this ``idempotency_key``; ``None`` without one."""
        return self._first_job(_JOBS.where(_JOB.c.idempotency_key == idempotency_key))

    def job(self, job_id: str) -> JobRecord | None:
        """Return the job with this id, or the latest job of the study with this name; ``None`` without one."""
        if "\0" in job_id:
            # No name has a zero byte, and a PostgreSQL server refuses to look for one.
            return None
        return self._first_job(_JOB_NAMED, name=job_id)

    def jobs(
        self,
        *,
        states: Sequence[JobState] = (),
        study: str | None = None,
        request: Document | None = None,
        before: int | None = None,
        most: int = 100,
    ) -> list[JobRecord]:
        """Return at most ``most`` jobs that meet every condition given, newest first.

        ``before``: jobs with a smaller number, for the next page. ``request``: jobs with exactly this request.
        """
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
            jobs = [_record_of(row) for each in queries for row in connection.execute(each)]
        return sorted(jobs, key=lambda job: -job.number)[:most]

    def listed(
        self, *, states: Sequence[JobState], containing: str, order: JobOrder, is_ascending: bool, skip: int, most: int
    ) -> list[JobRecord]:
        """Return a page of the table of jobs: ``most`` jobs after the first ``skip``, sorted by a column ``order``.

        They are in one of ``states`` (any if empty), and their study, owner, model, code or device (in use or needed)
        contains the text ``containing``. Jobs without a value to sort by come last, equal ones newest first.
        """
        query = _JOBS.where(_JOB.c.state.in_(states)) if states else _JOBS
        model, device = _JOB.c.request["model"].as_string(), _JOB.c.device["name"].as_string()
        if containing:
            code = _JOB.c.request["code"].as_string()
            columns = (_JOB.c.study, _JOB.c.submitted_by, model, code, device, _JOB.c.needs_kind, _JOB.c.needs_gpu)
            query = query.where(or_(*(column.icontains(containing, autoescape=True) for column in columns)))
        took: ColumnElement[Any] = _JOB.c.ended_at - _JOB.c.started_at
        # SQLite stores times as text, which it cannot subtract.
        if self._engine.dialect.name == "sqlite":
            took = func.julianday(_JOB.c.ended_at) - func.julianday(_JOB.c.started_at)
        keys: dict[JobOrder, ColumnElement[Any]] = {
            "submitted": _JOB.c.number,
            "study": func.lower(_JOB.c.study),
            "owner": func.lower(_JOB.c.submitted_by),
            "state": _JOB.c.state,
            "device": device,
            "batch": _JOB.c.request["effective_batch"].as_integer(),
            "took": took,
        }
        key = keys[order].asc() if is_ascending else keys[order].desc()
        query = query.order_by(key.nulls_last(), _JOB.c.number.desc()).offset(skip).limit(most)
        return [_record_of(row) for row in self._rows(query)]

    def next_jobs(self, most: int) -> list[JobRecord]:
        """Return the queued jobs that start next, in order."""
        return [_record_of(row) for row in self._rows(_IN_TURN, most=most)]

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state."""
        query = select(_JOB.c.state, func.count()).group_by(_JOB.c.state)
        return {row[0]: row[1] for row in self._rows(query)}

    def count_queued(self) -> int:
        """Return the number of queued jobs."""
        return int(self._rows(_COUNT_QUEUED)[0][0])

    def ahead_of(self, jobs: Sequence[JobRecord]) -> dict[str, int]:
        """Return by job id how many queued jobs start before each of these jobs."""
        if not jobs:
            return {}
        # As PLACE_IN_QUEUE in SQL. Only the places between the first and the last job are read; the rest is counted.
        places = {job.id: job.number - PLACES_PER_PRIORITY * job.priority for job in jobs}
        first, last = min(places.values()), max(places.values())
        with self._transaction() as connection:
            before = int(connection.execute(_COUNT_BEFORE, {"place": first}).scalar_one())
            between = [row[0] for row in connection.execute(_PLACES_BETWEEN, {"first": first, "last": last})]
        return {job_id: before + bisect.bisect_left(between, place) for job_id, place in places.items()}

    def events(self, job_id: str, after: int = 0, most: int = 1000) -> list[JobEvent]:
        """Return a job's events after event number ``after``, in order."""
        return [JobEvent(*row) for row in self._rows(_EVENTS, job_id=job_id, after=after, most=most)]

    def cancel(self, job_id: str) -> JobRecord | None:
        """Cancel a queued job at once, or ask the runner of a running job to cancel it; return the job's new record.

        Returns ``None`` for an unknown id.
        """
        cancelled_at = self.clock()
        with self._transaction(writes=True) as connection:
            queued = and_(_JOB.c.id == job_id, _JOB.c.state == "queued")
            cancelled = {
                "state": "cancelled",
                "is_cancel_asked": True,
                "ended_at": cancelled_at,
                "events": _JOB.c.events + 1,
            }
            row = connection.execute(update(_JOB).where(queued).values(**cancelled).returning(_JOB.c.events)).first()
            if row is not None:
                self._insert_events(connection, job_id, row[0], [("state", {"state": "cancelled"})])
            running = and_(_JOB.c.id == job_id, _JOB.c.state == "running")
            connection.execute(update(_JOB).where(running).values(is_cancel_asked=True))
            found = connection.execute(_JOBS.where(_JOB.c.id == job_id)).first()
        return None if found is None else _record_of(found)

    def forget(self, ended_before: datetime, most: int = 500) -> dict[str, str]:
        """Delete at most ``most`` jobs that ended before a moment, and their events; return their studies by job id."""
        old = select(_JOB.c.id, _JOB.c.study).where(_JOB.c.state.in_(ENDED), _JOB.c.ended_at < ended_before)
        with self._transaction(writes=True) as connection:
            found = {row[0]: row[1] for row in connection.execute(old.order_by(_JOB.c.number).limit(most))}
            for column in (_EVENT.c.job_id, _JOB.c.id):
                connection.execute(delete(column.table).where(column.in_(found)))
        return found

    # Attempts

    def next_for(self, offer: Offer) -> JobRecord | None:
        """Return the first queued job whose needs the offered devices meet; ``None`` without one."""
        return self._first_job(
            _NEXT,
            device_kind=offer.device_kind,
            device_name=offer.device_name.lower(),
            memory_bytes=offer.memory_bytes,
            device_count=offer.count,
        )

    def start(self, job_id: str, device: Document) -> JobRecord | None:
        """Record that a queued job starts on these devices; return the job, or ``None`` if it is no longer queued."""
        given = {"job_id": job_id, "new_device": device, "moment": self.clock()}
        # Before other writes: a device is idle until its job starts.
        with self._transaction(writes=True, is_urgent=True) as connection:
            row = connection.execute(_START, given).first()
            if row is None:
                return None
            job = _record_of(row)
            self._insert_events(connection, job.id, job.events, [("state", {"state": "running", "device": device})])
        return job

    @contextlib.contextmanager
    def writing(self, job_id: str, attempt: int, events: Sequence[Event], **changes: Any) -> Iterator[Connection]:
        """Write new events and changed columns of a running job in a transaction, in which the block may write more.

        Raises ``AttemptOverError`` where this attempt no longer runs the job; nothing is written then.
        """
        given = {"job_id": job_id, "attempt": attempt, "added": len(events)}
        given |= {f"new_{name}": value for name, value in changes.items()}
        with self._transaction(writes=True) as connection:
            row = connection.execute(_write_running(tuple(changes)), given).first()
            if row is None:
                raise AttemptOverError(job_id)
            self._insert_events(connection, job_id, row[0], events)
            yield connection

    def end(self, job_id: str, attempt: int, state: JobState, problem: Document | None = None) -> None:
        """Record that a job has ended. Raises ``AttemptOverError`` where this attempt no longer runs the job."""
        event = ("state", {"state": state, **({"problem": problem} if problem else {})})
        with self.writing(job_id, attempt, [event], state=state, problem=problem, ended_at=self.clock(), status=None):
            pass

    def put_back(self, job_id: str, attempt: int, why: str, *, is_lost: bool) -> JobState:
        """Put a job back into the queue after an attempt without a result; return its new state.

        ``is_lost``: the attempt's process or node was lost. After ``MOST_LOSSES`` of these the job has failed instead;
        a job that is to be cancelled is cancelled. Raises ``AttemptOverError`` where this attempt no longer runs it.
        """
        with self._transaction(writes=True) as connection:
            row = connection.execute(_JOBS.where(_running(job_id, attempt)).with_for_update()).first()
            if row is None:
                raise AttemptOverError(job_id)
            job = _record_of(row)
            losses = job.losses + is_lost
            state: JobState = "queued"
            problem: Document | None = None
            if job.is_cancel_asked:
                state = "cancelled"
            elif losses >= MOST_LOSSES:
                state = "failed"
                problem = {
                    "exit_code": 8,
                    "message": f"{losses} attempts at this search were lost, the last one: {why}",
                    "hint": "see the service's log; submit it again once the reason is known",
                }
            event: Document = {"state": state}
            if state == "queued":
                event["why"] = why
            elif problem is not None:
                event["problem"] = problem
            values: dict[str, Any] = {"state": state, "problem": problem, "status": None, "losses": losses}
            values |= {"events": job.events + 1, "ended_at": self.clock() if state in ENDED else None}
            connection.execute(update(_JOB).where(_JOB.c.id == job_id).values(**values))
            self._insert_events(connection, job_id, job.events + 1, [("state", event)])
        return state

    # Tokens

    def add_token(self, name: str, role: Role) -> str:
        """Create a token, store its hash, and return the token, which cannot be read again.

        Raises ``InvalidRequestError`` for an unusable name or one in use.
        """
        if not name or len(name) > 64 or not name.isprintable():
            raise InvalidRequestError(f"{name[:80]!r} is not a name for a token", "use up to 64 printable characters")
        if any(known.name == name for known in self.tokens()):
            raise InvalidRequestError(
                f"there is a token named {name!r} already", "remove it first, or use another name"
            )
        text = "at_" + secrets.token_urlsafe(_TOKEN_BYTES)
        token = TokenRecord(new_id(), name, role, self.clock())
        with self._transaction(writes=True, is_single=True) as connection:
            connection.execute(insert(_TOKEN).values(**dataclasses.asdict(token), digest=digest_of(text)))
        return text

    def tokens(self) -> list[TokenRecord]:
        """Return every token, the oldest first."""
        return list(self.tokens_by_digest().values())

    def tokens_by_digest(self) -> dict[str, TokenRecord]:
        """Return every token by its digest, the oldest first."""
        return {digest: TokenRecord(*row) for digest, *row in self._rows(_TOKENS)}

    def remove_token(self, name: str) -> bool:
        """Delete the tokens of this name; return whether there was one."""
        with self._transaction(writes=True, is_single=True) as connection:
            return connection.execute(delete(_TOKEN).where(_TOKEN.c.name == name)).rowcount > 0

    # Within

    def _rows(self, query: Select[Any], **values: object) -> Sequence[Any]:
        """Return all rows of a query, with these values of its parameters."""
        with self._transaction(is_single=True) as connection:
            return connection.execute(query, values).all()

    def _first_job(self, query: Select[Any], **values: object) -> JobRecord | None:
        """Return the first job that a query finds; ``None`` without one."""
        rows = self._rows(query, **values)
        return _record_of(rows[0]) if rows else None

    @contextlib.contextmanager
    def _transaction(
        self, *, writes: bool = False, is_urgent: bool = False, is_single: bool = False
    ) -> Iterator[Connection]:
        """Open a transaction (see ``engine.transaction``); a writer waits for its turn among this process's writers."""
        turn = self._writers.take(is_urgent=is_urgent) if writes else contextlib.nullcontext()
        opened = transaction(self._engine, writes=writes, is_single=is_single)
        with turn, storage_errors(self._label), opened as connection:
            yield connection

    def _insert_events(self, connection: Connection, job_id: str, last: int, events: Sequence[Event]) -> None:
        """Insert events of a job, numbered so that the final one has the number ``last``."""
        if not events:
            return
        created_at = self.clock()
        rows = [
            {"job_id": job_id, "number": number, "kind": kind, "document": document, "created_at": created_at}
            for number, (kind, document) in enumerate(events, start=last - len(events) + 1)
        ]
        connection.execute(_ADD_EVENTS, rows)


_JOB_FIELDS = tuple(field.name for field in dataclasses.fields(JobRecord))


def _running(job_id: Any, attempt: Any) -> ColumnElement[bool]:
    """Return the SQL condition that this attempt runs the job."""
    return and_(_JOB.c.id == job_id, _JOB.c.state == "running", _JOB.c.attempts == attempt)


# Statements that run with every request are made once, since making one takes as long as running it.
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
# The SQL condition that an offer meets a job's needs, by the rules of ``Offer.meets``.
_FITS = and_(
    or_(_JOB.c.needs_kind.is_(None), _JOB.c.needs_kind == bindparam("device_kind")),
    or_(_JOB.c.needs_gpu.is_(None), bindparam("device_name", type_=String).contains(_JOB.c.needs_gpu)),
    or_(_JOB.c.needs_memory_bytes.is_(None), _JOB.c.needs_memory_bytes <= bindparam("memory_bytes")),
    _JOB.c.needs_count <= bindparam("device_count"),
)
_NEXT = _JOBS.where(_QUEUED, _FITS).order_by(_place).limit(1)
_START = (
    update(_JOB)
    .where(_JOB.c.id == bindparam("job_id"), _QUEUED)
    .values(
        state="running",
        attempts=_JOB.c.attempts + 1,
        heard=0,
        device=bindparam("new_device", type_=_JOB.c.device.type),
        started_at=func.coalesce(_JOB.c.started_at, bindparam("moment", type_=_JOB.c.started_at.type)),
        events=_JOB.c.events + 1,
    )
    .returning(*_JOB.c)
)
_EVENTS = (
    select(_EVENT.c.number, _EVENT.c.kind, _EVENT.c.document, _EVENT.c.created_at)
    .where(_EVENT.c.job_id == bindparam("job_id"), _EVENT.c.number > bindparam("after"))
    .order_by(_EVENT.c.number)
    .limit(bindparam("most", type_=Integer))
)
_ADD_EVENTS = insert(_EVENT)
_TOKENS = select(*(_TOKEN.c[name] for name in ("digest", "id", "name", "role", "created_at"))).order_by("created_at")


@functools.cache
def _write_running(names: tuple[str, ...]) -> Update:
    """Return the statement that updates the columns ``names`` of a running job, and its number of events.

    Its parameters are ``job_id``, ``attempt``, the number of ``added`` events, and ``new_…`` for each column.
    """
    values = {name: bindparam(f"new_{name}", type_=_JOB.c[name].type) for name in names}
    statement = update(_JOB).where(_running(bindparam("job_id"), bindparam("attempt"))).values(**values)
    return statement.values(events=_JOB.c.events + bindparam("added", type_=Integer)).returning(_JOB.c.events)


def _record_of(row: Row[Any]) -> JobRecord:
    """Return the job of a row."""
    columns = row._mapping
    needs = Needs(columns["needs_kind"], columns["needs_gpu"], columns["needs_memory_bytes"], columns["needs_count"])
    return JobRecord(needs=needs, **{name: columns[name] for name in _JOB_FIELDS if name != "needs"})
