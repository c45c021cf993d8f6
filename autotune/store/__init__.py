"""Keep studies in a database: one file with Optuna's tables and autotune's own.

``open_store`` returns a ``Store``; records go in and come out as frozen values. Only the controlling process of a
search writes. Names that need SQLAlchemy, Alembic or Optuna are imported when they are first used, since those imports
take half a second, in which the trial server can start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotune.store.location import DEFAULT_LOCATION, LOCATION_VARIABLE, resolve_location

if TYPE_CHECKING:
    from autotune.store.answer_file import AnswerFile, open_answers
    from autotune.store.engine import LOCK_TIMEOUT_SECONDS, damaged, storage_errors
    from autotune.store.measured import MeasuredTrial, measured_trials
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
    from autotune.store.stored_answers import Answers

__all__ = [
    "DEFAULT_LOCATION",
    "LOCATION_VARIABLE",
    "LOCK_TIMEOUT_SECONDS",
    "TRIAL_ID_ATTRIBUTE",
    "AnswerFile",
    "Answers",
    "MeasuredTrial",
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
    "measured_trials",
    "migrations_folder",
    "new_id",
    "now",
    "open_answers",
    "open_store",
    "optuna_arguments",
    "refuse_writes",
    "resolve_location",
    "storage_errors",
    "upgrade",
]

_MODULE_OF = {
    "AnswerFile": "answer_file",
    "Answers": "stored_answers",
    "LOCK_TIMEOUT_SECONDS": "engine",
    "MeasuredTrial": "measured",
    "measured_trials": "measured",
    "PastTrial": "records",
    "Stage": "records",
    "StudyRecord": "records",
    "StudyState": "records",
    "StudySummary": "records",
    "TRIAL_ID_ATTRIBUTE": "records",
    "TrialRecord": "records",
    "TrialState": "records",
    "damaged": "engine",
    "new_id": "records",
    "now": "records",
    "open_answers": "answer_file",
    "storage_errors": "engine",
    "Store": "repository",
    "close_optuna": "optuna_storage",
    "current_revision": "opening",
    "migrations_folder": "migrate",
    "open_store": "opening",
    "optuna_arguments": "optuna_storage",
    "refuse_writes": "optuna_storage",
    "upgrade": "opening",
}


def __getattr__(name: str) -> Any:
    """Return a name of this package, importing its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
