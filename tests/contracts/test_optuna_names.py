"""Test the private names of Optuna and optuna-dashboard that are used, in the installed versions."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import optuna_dashboard._serializer
import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.results.dashboard_private import CONSTRAINTS_KEY, show_constraints
from autotune.store.optuna_private import METRIC_NAMES_KEY, OPTUNA_TABLES, HookedStorage, create_trial, id_of_study


class Storage(HookedStorage):
    """Notes what is read through the hook."""

    def __init__(self, url: str) -> None:
        self.read: list[int] = []
        super().__init__(url)

    def read_trials(self, study_id: int, read: Callable[[], list[FrozenTrial]]) -> list[FrozenTrial]:
        self.read.append(study_id)
        return read()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(f"sqlite:///{tmp_path}/optuna.db")


def test_all_reading_of_trials_goes_through_the_hook(storage: Storage) -> None:
    study = optuna.create_study(storage=storage, study_name="bert")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
    number = id_of_study(study)
    storage.read.clear()
    assert len(storage.get_all_trials(number)) == 3
    assert storage.read == [number]
    storage.read.clear()
    loaded = optuna.load_study(study_name="bert", storage=storage)
    assert len(loaded.trials) == 3
    assert number in storage.read


def test_the_names_of_objectives_are_a_system_attribute(storage: Storage) -> None:
    study = optuna.create_study(storage=storage)
    study.set_metric_names(["samples/s"])
    assert storage.get_study_system_attrs(id_of_study(study))[METRIC_NAMES_KEY] == ["samples/s"]
    (frozen,) = storage.get_all_studies()
    assert id_of_study(frozen) == id_of_study(study)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_trial_is_created_with_its_number(storage: Storage, in_memory: bool) -> None:
    place: BaseStorage = InMemoryStorage() if in_memory else storage
    assert hasattr(place, "_create_new_trial") is not in_memory
    study = optuna.create_study(storage=place)
    study.ask()
    template = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={"stage": "search"})
    row_id, number = create_trial(place, id_of_study(study), template)
    assert number == 1
    assert place.get_trial(row_id) == study.trials[1]
    assert study.trials[1].user_attrs == {"stage": "search"}


def test_the_tables_of_studies_and_trials_hang_together_by_two_columns() -> None:
    """A copy gives studies and trials new numbers, and everything else by those."""
    assert {"studies", "trials", "trial_params", "trial_values", "study_directions"} <= set(OPTUNA_TABLES)
    for name, table in OPTUNA_TABLES.items():
        assert len(table.primary_key) == 1
        referred = {key.target_fullname for key in table.foreign_keys}
        assert referred == {"studies": set(), "trials": {"studies.study_id"}}.get(
            name, {"studies.study_id"} if "study_id" in table.c else {"trials.trial_id"}
        )


def test_the_dashboard_looks_for_constraints_there() -> None:
    serializer: Any = optuna_dashboard._serializer
    assert serializer.CONSTRAINTS_KEY == CONSTRAINTS_KEY
    study = optuna.create_study()
    trial = study.ask()
    trial.set_constraint("memory", 2.0)
    study.tell(trial, 1.0)
    frozen = study.trials[0]
    show_constraints(frozen)
    # Versions differ in what else they ask for: the study's attributes.
    others = len(inspect.signature(serializer.serialize_frozen_trial).parameters) - 2
    assert serializer.serialize_frozen_trial(0, frozen, *[{}] * others)["constraints"] == [2.0]
