"""Test the private names of Optuna and optuna-dashboard that are used, in the installed versions."""

import inspect
from typing import Any

import optuna
import optuna_dashboard._serializer

from autotune.results.optuna_trials import (
    CONSTRAINTS_KEY,
    METRIC_NAMES_KEY,
    frozen_study,
    id_of_trial,
    set_dashboard_fields,
)
from autotune.store.records import StudyRecord


def test_a_study_is_frozen_as_optunas_storages_do() -> None:
    theirs = optuna.create_study(study_name="bert", direction="maximize")
    theirs.set_metric_names(["samples/s"])
    (frozen,) = theirs._storage.get_all_studies()
    ours = frozen_study(frozen._study_id, StudyRecord("bert", "w", "e", {}, {}, "1"))
    assert ours == frozen
    assert METRIC_NAMES_KEY in ours.system_attrs


def test_the_dashboard_looks_for_constraints_there() -> None:
    serializer: Any = optuna_dashboard._serializer
    assert serializer.CONSTRAINTS_KEY == CONSTRAINTS_KEY
    frozen = optuna.trial.create_trial(value=1.0, constraints={"memory": 2.0})
    set_dashboard_fields(frozen, 7)
    assert id_of_trial(frozen) == 7
    # Versions differ in what else they ask for: the study's attributes.
    others = len(inspect.signature(serializer.serialize_frozen_trial).parameters) - 2
    assert serializer.serialize_frozen_trial(0, frozen, *[{}] * others)["constraints"] == [2.0]
