"""Adapt private names of Optuna and optuna-dashboard: studies and trials with numbers, and where constraints are.

``tests/contracts`` checks them against the installed versions.
"""

from __future__ import annotations

from typing import Any

from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial

from autotune.results.optuna_trials import OBJECTIVE_NAMES
from autotune.store.records import StudyRecord

CONSTRAINTS_KEY = "constraints"
"""The trial's system attribute in which the dashboard looks for constraints (``_serializer.CONSTRAINTS_KEY`` in 0.20
and 0.21). It does not know those that ``Trial.set_constraint`` sets."""
METRIC_NAMES_KEY = "study:metric_names"
"""The study's system attribute that ``Study.set_metric_names`` writes (``optuna.study.study._SYSTEM_ATTR_METRIC_NAMES``
in Optuna 5)."""


def frozen_study(number: int, study: StudyRecord) -> FrozenStudy:
    """Return a study as Optuna's ``FrozenStudy``, with the name of its objective."""
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
