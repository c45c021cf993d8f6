"""Declare autotune's own tables for SQLAlchemy.

Older versions had Optuna's tables beside them, which stay as they are. ``alembic/versions`` builds what is declared
here; a test compares the two.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Double, ForeignKey, Index, MetaData, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

PREFIX = "autotune_"
"""Prefix of every table of autotune; all other tables are left alone."""
VERSION_TABLE = "autotune_alembic_version"
"""Alembic's version table. Another program may have the name ``alembic_version``, as Optuna has."""

_ID_LENGTH = 32
_FINGERPRINT_LENGTH = 64
_WORD_LENGTH = 16
# The length of names in Optuna's tables, which older versions used.
_NAME_LENGTH = 512
# None then means no document, rather than the JSON document "null".
_DOCUMENT = JSON(none_as_null=True)

# Constraints need names that do not depend on the database, so that later migrations can drop them.
_NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """A column type for times in UTC. SQLite stores no time zone, so it is removed and added here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return a time as the database stores it, in UTC; raises ``ValueError`` for a time without a zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"the time {value} bears no time zone")
        in_utc = value.astimezone(UTC)
        return in_utc.replace(tzinfo=None) if dialect.name == "sqlite" else in_utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return a stored time in UTC. PostgreSQL returns it in the session's time zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """The registry of autotune's tables."""

    metadata = MetaData(naming_convention=_NAMING_CONVENTION)
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime,
        # What SQLAlchemy makes of a plain float depends on its version.
        float: Double,
    }


class EnvironmentRow(Base):
    """A device with its driver and library versions; one row for each fingerprint."""

    __tablename__ = "autotune_environments"

    id: Mapped[str] = mapped_column(String(_ID_LENGTH), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(_FINGERPRINT_LENGTH), unique=True)
    document: Mapped[dict[str, Any]] = mapped_column(_DOCUMENT)
    created_at: Mapped[datetime]


class WorkloadRow(Base):
    """A training job without its batch; one row for each fingerprint."""

    __tablename__ = "autotune_workloads"

    id: Mapped[str] = mapped_column(String(_ID_LENGTH), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(_FINGERPRINT_LENGTH), unique=True)
    document: Mapped[dict[str, Any]] = mapped_column(_DOCUMENT)
    created_at: Mapped[datetime]


class StudyRow(Base):
    """One search. The two trial ids are no foreign keys: trials refer to studies already."""

    __tablename__ = "autotune_studies"

    id: Mapped[str] = mapped_column(String(_ID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(_NAME_LENGTH), unique=True)
    workload_id: Mapped[str] = mapped_column(ForeignKey(WorkloadRow.id))
    environment_id: Mapped[str] = mapped_column(ForeignKey(EnvironmentRow.id))
    request: Mapped[dict[str, Any]] = mapped_column(_DOCUMENT)
    ceiling: Mapped[dict[str, Any]] = mapped_column(_DOCUMENT)
    state: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    stop_reason: Mapped[str | None] = mapped_column(String(_WORD_LENGTH))
    stopped_because: Mapped[str | None] = mapped_column(Text)
    left_out: Mapped[list[dict[str, Any]] | None] = mapped_column(_DOCUMENT)
    look: Mapped[dict[str, Any] | None] = mapped_column(_DOCUMENT)
    best_trial_id: Mapped[str | None] = mapped_column(String(_ID_LENGTH))
    baseline_trial_id: Mapped[str | None] = mapped_column(String(_ID_LENGTH))
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    seconds: Mapped[float]
    autotune_version: Mapped[str] = mapped_column(String(64))


class TrialRow(Base):
    """One trial, with the ids by which a later search on the same machine and model finds it."""

    __tablename__ = "autotune_trials"
    __table_args__ = (Index(None, "study_id", "number"), Index(None, "environment_id", "workload_id"))

    id: Mapped[str] = mapped_column(String(_ID_LENGTH), primary_key=True)
    study_id: Mapped[str] = mapped_column(ForeignKey(StudyRow.id))
    number: Mapped[int]
    stage: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    candidate: Mapped[dict[str, Any]] = mapped_column(_DOCUMENT)
    state: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    outcome: Mapped[dict[str, Any] | None] = mapped_column(_DOCUMENT)
    log_path: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[datetime]
    seconds: Mapped[float | None]
    workload_id: Mapped[str] = mapped_column(ForeignKey(WorkloadRow.id))
    environment_id: Mapped[str] = mapped_column(ForeignKey(EnvironmentRow.id))


class AnswerRow(Base):
    """A cached answer of a trial process. It may be deleted: the process is then asked again."""

    __tablename__ = "autotune_answers"

    key: Mapped[str] = mapped_column(String(_FINGERPRINT_LENGTH), primary_key=True)
    kind: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    document: Mapped[dict[str, Any]] = mapped_column(_DOCUMENT)
    created_at: Mapped[datetime]


class LeaseRow(Base):
    """Who works on something, such as a study, and when that ends unless the row is renewed."""

    __tablename__ = "autotune_leases"

    name: Mapped[str] = mapped_column(String(_NAME_LENGTH + 32), primary_key=True)
    token: Mapped[str] = mapped_column(String(_ID_LENGTH))
    owner: Mapped[str] = mapped_column(String(256))
    host: Mapped[str] = mapped_column(String(256))
    machine: Mapped[str] = mapped_column(String(256))
    pid: Mapped[int]
    process_started: Mapped[str] = mapped_column(String(32))
    acquired_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]
    expires_at: Mapped[datetime]


PLACES_PER_PRIORITY = 100
"""How many places further ahead one step of priority puts a job. It is limited, so that a stream of urgent jobs cannot
keep another waiting for ever. The index ``ix_autotune_jobs_state_place`` is made for this number."""
# Written out, since a database finds an index of an expression by the same expression.
PLACE_IN_QUEUE = text(f"(number - {PLACES_PER_PRIORITY} * priority)")


class JobRow(Base):
    """A search that was handed to a service, and the attempt that runs it."""

    __tablename__ = "autotune_jobs"
    __table_args__ = (
        Index(None, "state", "number"),
        Index("ix_autotune_jobs_state_place", "state", PLACE_IN_QUEUE),
        Index(None, "study"),
    )

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(_ID_LENGTH), unique=True)
    study: Mapped[str] = mapped_column(String(_NAME_LENGTH))
    request: Mapped[dict[str, Any]] = mapped_column(_DOCUMENT)
    needs_kind: Mapped[str | None] = mapped_column(String(_WORD_LENGTH))
    needs_gpu: Mapped[str | None] = mapped_column(String(64))
    needs_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    needs_count: Mapped[int]
    priority: Mapped[int]
    state: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    is_cancel_asked: Mapped[bool] = mapped_column(default=False)
    attempts: Mapped[int] = mapped_column(default=0)
    losses: Mapped[int] = mapped_column(default=0)
    heard: Mapped[int] = mapped_column(default=0)
    device: Mapped[dict[str, Any] | None] = mapped_column(_DOCUMENT)
    problem: Mapped[dict[str, Any] | None] = mapped_column(_DOCUMENT)
    status: Mapped[dict[str, Any] | None] = mapped_column(_DOCUMENT)
    events: Mapped[int]
    submitted_by: Mapped[str] = mapped_column(String(64))
    submitted_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    idempotency_key: Mapped[str | None] = mapped_column(String(128), unique=True)


class JobEventRow(Base):
    """Something that happened to a job, numbered from 1 on for each."""

    __tablename__ = "autotune_job_events"

    job_id: Mapped[str] = mapped_column(String(_ID_LENGTH), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    document: Mapped[dict[str, Any]] = mapped_column(_DOCUMENT)
    created_at: Mapped[datetime]


class TokenRow(Base):
    """A bearer token's digest, with what it allows."""

    __tablename__ = "autotune_tokens"

    id: Mapped[str] = mapped_column(String(_ID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    created_at: Mapped[datetime]
