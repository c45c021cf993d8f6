"""Adapt private names of Optuna.

``tests/contracts`` checks that each exists in the installed version and behaves as assumed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._rdb.models import BaseModel
from optuna.trial import FrozenTrial
from sqlalchemy import Table

OPTUNA_TABLES: Mapping[str, Table] = {
    name: table
    for name, table in BaseModel.metadata.tables.items()
    # The version is the database's own, and a heartbeat that of a process.
    if name not in ("version_info", "trial_heartbeats")
}
"""The tables in which Optuna keeps studies, by name."""

METRIC_NAMES_KEY = "study:metric_names"
"""The study's system attribute that ``Study.set_metric_names`` writes (``optuna.study.study._SYSTEM_ATTR_METRIC_NAMES``
in Optuna 5)."""


class HookedStorage(RDBStorage):
    """Optuna's storage in which a subclass may change how a study's trials are read.

    ``get_all_trials`` and the loading of a study both read through one private method. An Optuna without it reads as
    it always does, and ``read_trials`` is never called.
    """

    def read_trials(self, study_id: int, read: Callable[[], list[FrozenTrial]]) -> list[FrozenTrial]:
        """Return what Optuna's own ``read`` returns."""
        return read()

    def _get_trials(self, study_id: int, *arguments: Any, **options: Any) -> list[FrozenTrial]:
        def read() -> list[FrozenTrial]:
            trials: list[FrozenTrial] = super(HookedStorage, self)._get_trials(study_id, *arguments, **options)
            return trials

        return self.read_trials(study_id, read)


def create_trial(storage: BaseStorage, study_id: int, trial: FrozenTrial) -> tuple[int, int]:
    """Write a trial as a whole; return its key and its number within the study.

    Optuna's database storage knows the number after writing. Its public method returns the key only, and reading the
    number by that takes half as long again.
    """
    create: Callable[[int, FrozenTrial], Any] | None = getattr(storage, "_create_new_trial", None)
    if create is None:
        row_id = storage.create_new_trial(study_id, trial)
        return row_id, storage.get_trial_number_from_id(row_id)
    written = create(study_id, trial)
    return written._trial_id, written.number


def id_of_study(study: Any) -> int:
    """Return the number that Optuna's storage has for a study."""
    number: int = study._study_id
    return number
