"""Convert trials and studies to the types of Optuna and its dashboard: state, value, constraint, parameters, number.

Samplers get trials in this form, and the dashboard shows them in it. autotune's tables have the only record.

``tests/contracts`` checks the conversions against the installed versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.options import Objective
from autotune.core.outcome import Completed, Outcome, OutOfMemory, source_of
from autotune.core.schema import decode
from autotune.core.units import GIB
from autotune.space.levers import LEVERS
from autotune.space.space import LARGEST_FREE_BATCH
from autotune.store.records import StudyRecord, TrialRecord

CONSTRAINT = "memory_over_line_gib"
"""GiB by which a trial's peak is above the memory line; with 0 or less a trial is feasible."""
TRIAL_ID_ATTRIBUTE = "autotune_trial_id"
"""The user attribute with ``TrialRecord.id``."""
OBJECTIVE_NAMES: dict[str, str] = {"throughput": "samples/s", "max-batch": "per-device batch"}
"""The name of a trial's value, by the study's objective; dashboards label their axes with it."""
BATCH = "per_device_train_batch_size"


def state_and_value(candidate: Candidate, outcome: Outcome, objective: Objective) -> tuple[TrialState, float | None]:
    """Return Optuna's state and value of a trial. PRUNED (does not fit) and FAIL (fault, disturbed) have no value."""
    if isinstance(outcome, Completed):
        batch = candidate.per_device_train_batch_size
        value = float(batch) if objective == "max-batch" else outcome.measurement.samples_per_second
        return TrialState.COMPLETE, value
    is_too_large = isinstance(outcome, OutOfMemory) and not outcome.disturbed
    return TrialState.PRUNED if is_too_large else TrialState.FAIL, None


def over_line_gib(outcome: Outcome, ceiling: Ceiling, arm: Arm | None = None) -> float | None:
    """Return by how many GiB a trial's peak is above the memory line (the cap less the headroom).

    A trial that ran out of memory needed more than the cap, so it was above the line by at least the headroom. ``None``
    where it is not known: after a fault, or out of memory while another process disturbed the trial.
    """
    if isinstance(outcome, Completed):
        return outcome.measurement.excess_bytes(arm or Arm(), ceiling) / GIB
    if isinstance(outcome, OutOfMemory) and not outcome.disturbed:
        # At least a byte, so that it is infeasible also where no headroom is asked for.
        return max(1, ceiling.headroom_bytes, (outcome.peak_reserved_bytes or 0) - ceiling.line_bytes) / GIB
    return None


def frozen_trials(study: StudyRecord, records: Iterable[TrialRecord]) -> list[FrozenTrial]:
    """Return a study's trials as Optuna's, all with the parameters that varied or, in a running study, may vary."""
    settings = [(record, record.candidate.recorded_parameters()) for record in records]
    values: dict[str, set[Any]] = {BATCH: set()}
    if study.state == "running":
        values |= {row.name: set() for row in LEVERS if row.is_optunas}
    # The accumulation follows from the batch.
    for name in {name for _, own in settings for name in own} - {"gradient_accumulation_steps"}:
        found = {own.get(name) for _, own in settings}
        varies = len(found) > 1 or name in values
        if varies and all(value is None or isinstance(value, bool | int | str) for value in found):
            values[name] = found
    spaces = {name: _distribution(name, found) for name, found in values.items()}
    objective, ceiling = study.request.get("objective", "throughput"), decode(study.ceiling, Ceiling)
    return [
        _frozen(record, {name: own.get(name) for name in spaces}, spaces, objective, ceiling)
        for record, own in settings
    ]


def _distribution(name: str, found: set[Any]) -> BaseDistribution:
    """Return a parameter's distribution, with the lever's known values first: so refreshing a page changes no axis."""
    if name == BATCH:
        return IntDistribution(1, LARGEST_FREE_BATCH)
    known = next((row.values for row in LEVERS if row.name == name), ())
    # ``None`` cannot be compared, so it is sorted first.
    return CategoricalDistribution([*known, *sorted(found - {*known}, key=lambda value: (value is not None, value))])


def _frozen(
    record: TrialRecord,
    params: dict[str, Any],
    spaces: dict[str, BaseDistribution],
    objective: Objective,
    ceiling: Ceiling,
) -> FrozenTrial:
    """Return a trial as Optuna's: its state, value, constraint, parameters and times."""
    outcome, candidate = record.outcome, record.candidate
    state, value, excess = TrialState.RUNNING, None, None
    if outcome is not None:
        state, value = state_and_value(candidate, outcome, objective)
        excess = over_line_gib(outcome, ceiling, candidate.arm)
    trial = optuna.trial.create_trial(
        state=state,
        value=value,
        params=params,
        distributions=spaces,
        user_attrs={TRIAL_ID_ATTRIBUTE: record.id, "stage": record.stage, **_attributes(candidate, outcome)},
        constraints={} if excess is None else {CONSTRAINT: excess},
    )
    trial.number = record.number
    # Optuna's times have no time zone.
    trial.datetime_start = record.started_at.astimezone().replace(tzinfo=None)
    if outcome is not None:
        trial.datetime_complete = trial.datetime_start + timedelta(seconds=record.seconds or 0.0)
    return trial


def _attributes(candidate: Candidate, outcome: Outcome | None) -> dict[str, float | str]:
    """Return the user attributes of a trial: measured numbers, for plots, and where a reused trial comes from."""
    attributes: dict[str, float | str] = {"gradient_accumulation_steps": candidate.gradient_accumulation_steps}
    source = source_of(outcome)
    if source is not None:
        attributes["reused_from"] = source.describe()
    if isinstance(outcome, Completed):
        measured = outcome.measurement
        attributes["samples_per_second"] = measured.samples_per_second
        attributes["step_seconds"] = measured.step_seconds
        attributes["peak_reserved_gib"] = measured.peak_reserved_bytes / GIB
        for name in ("joules_per_sample", "gpu_busy_share", "cpu_core", "skipped_steps"):
            if (value := getattr(measured, name)) is not None:
                attributes[name] = value
    elif isinstance(outcome, OutOfMemory) and outcome.peak_reserved_bytes is not None:
        attributes["peak_reserved_gib"] = outcome.peak_reserved_bytes / GIB
    return attributes


CONSTRAINTS_KEY = "constraints"
"""The trial's system attribute in which the dashboard looks for constraints (``_serializer.CONSTRAINTS_KEY`` in 0.20
and 0.21). It does not know those that ``Trial.set_constraint`` sets."""
METRIC_NAMES_KEY = "study:metric_names"
"""The study's system attribute that ``Study.set_metric_names`` writes (``optuna.study.study._SYSTEM_ATTR_METRIC_NAMES``
in Optuna 5)."""


def frozen_study(number: int, study: StudyRecord) -> FrozenStudy:
    """Return a study as Optuna's ``FrozenStudy`` with this number, with the name of its objective."""
    name = OBJECTIVE_NAMES[study.request.get("objective", "throughput")]
    attributes: dict[str, Any] = {METRIC_NAMES_KEY: [name]}
    return FrozenStudy(study.name, StudyDirection.MAXIMIZE, {}, attributes, number)


def set_dashboard_fields(trial: FrozenTrial, number: int) -> None:
    """Set a trial's number in the storage, and copy its constraints to the attribute that the dashboard reads."""
    trial._trial_id = number
    if trial.constraints:
        trial.system_attrs[CONSTRAINTS_KEY] = list(trial.constraints.values())


def id_of_trial(trial: FrozenTrial) -> int:
    """Return the number of a trial in the storage."""
    return trial._trial_id
