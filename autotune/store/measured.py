"""Read what was measured of a workload on any GPU, for comparing GPUs.

Importing this loads SQLAlchemy, but not Alembic.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select

from autotune.core.candidate import Candidate
from autotune.core.outcome import Completed, outcome_from_document
from autotune.store.engine import build_engine, storage_errors, transaction
from autotune.store.location import resolve_location
from autotune.store.tables import EnvironmentRow, TrialRow, WorkloadRow


@dataclass(frozen=True)
class MeasuredTrial:
    """A completed trial, with the name that the driver gives its GPU."""

    id: str
    device_name: str
    candidate: Candidate
    outcome: Completed


def measured_trials(location: str, workload_fingerprint: str, lock_timeout_seconds: float) -> list[MeasuredTrial]:
    """Return the completed trials of a workload on all GPUs, oldest first; none without a database.

    Nothing is created or upgraded. Unreadable trials are left out. Raises ``StorageError`` where the database is
    locked, damaged or of another kind.
    """
    place = resolve_location(location)
    query = (
        select(TrialRow.id, TrialRow.candidate, TrialRow.outcome, EnvironmentRow.document)
        .join(WorkloadRow, WorkloadRow.id == TrialRow.workload_id)
        .join(EnvironmentRow, EnvironmentRow.id == TrialRow.environment_id)
        .where(
            WorkloadRow.fingerprint == workload_fingerprint,
            TrialRow.state == "completed",
            TrialRow.stage != "reused",
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
            read = outcome_from_document(outcome)
            if isinstance(read, Completed) and environment.get("device_kind") == "cuda":
                name = str(environment["device_name"])
                trials.append(MeasuredTrial(trial_id, name, Candidate.from_parameters(candidate), read))
    return trials
