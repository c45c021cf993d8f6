"""The database: one file with Optuna's tables and autotune's own.

``open_store`` gives a ``Store``; records go in and come out as frozen values. Only the controlling
process of a search writes.
"""

from autotune.store.engine import LOCK_TIMEOUT_SECONDS, damaged, storage_errors
from autotune.store.location import DEFAULT_LOCATION, LOCATION_VARIABLE, resolve_location
from autotune.store.migrate import migrations_folder
from autotune.store.opening import current_revision, open_store, upgrade
from autotune.store.optuna_storage import close_optuna, optuna_arguments, refuse_writes
from autotune.store.records import (
    TRIAL_ID_ATTRIBUTE,
    PastTrial,
    Stage,
    StudyRecord,
    StudyState,
    StudySummary,
    TrialRecord,
    TrialState,
    new_id,
    now,
)
from autotune.store.repository import Store

__all__ = [
    "DEFAULT_LOCATION",
    "LOCATION_VARIABLE",
    "LOCK_TIMEOUT_SECONDS",
    "TRIAL_ID_ATTRIBUTE",
    "PastTrial",
    "Stage",
    "Store",
    "StudyRecord",
    "StudyState",
    "StudySummary",
    "TrialRecord",
    "TrialState",
    "close_optuna",
    "current_revision",
    "damaged",
    "migrations_folder",
    "new_id",
    "now",
    "open_store",
    "optuna_arguments",
    "refuse_writes",
    "resolve_location",
    "storage_errors",
    "upgrade",
]
