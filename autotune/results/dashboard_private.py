"""Adapt private names of optuna-dashboard: where it looks for constraints.

``tests/contracts`` checks them against the installed version.
"""

from __future__ import annotations

from typing import Any

CONSTRAINTS_KEY = "constraints"
"""The trial's system attribute in which the dashboard looks for constraints (``_serializer.CONSTRAINTS_KEY`` in 0.20
and 0.21). It does not know those that ``Trial.set_constraint`` sets."""


def show_constraints(trial: Any) -> None:
    """Copy a trial's constraints to where the dashboard looks for them."""
    constraints = trial.constraints
    if constraints:
        trial.system_attrs[CONSTRAINTS_KEY] = list(constraints.values())
