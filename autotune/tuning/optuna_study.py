"""Record a search in an Optuna study: parameters, value, constraint and attributes of each trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.options import Objective
from autotune.core.outcome import Completed, Outcome, OutOfMemory, source_of
from autotune.core.units import GIB
from autotune.store.engine import storage_errors
from autotune.store.optuna_private import METRIC_NAMES_KEY, create_trial, id_of_study
from autotune.store.records import OBJECTIVE_NAMES, TRIAL_ID_ATTRIBUTE, Stage, TrialRecord, new_id
from autotune.store.repository import Store
from autotune.tuning.optuna_space import params_of

# The constraint: GiB above the line of a feasible trial; 0 or less is feasible.
CONSTRAINT = "memory_over_line_gib"


@dataclass(frozen=True)
class OptunaTrial:
    """A trial in Optuna's tables that has not ended."""

    trial_id: str
    number: int
    """Optuna's number of the trial within the study."""
    row_id: int
    """The key of the trial in Optuna's tables."""


class OptunaStudy:
    """The trials of one study in Optuna's tables. The study is created if it does not exist.

    Optuna writes each parameter of a trial in its own transaction when it is asked for one; here a trial is written as
    a whole.
    """

    def __init__(
        self, name: str, store: Store, space: dict[str, BaseDistribution], objective: Objective, ceiling: Ceiling
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._objective = objective
        self._ceiling = ceiling
        self._label = store.label
        # Optuna's own tables know nothing of leases, so that is asked before each of its writes.
        self._check_lease = store.check_lease
        self._storage = store.optuna
        with storage_errors(self._label):
            # Every parameter is given, so that no sampler draws any.
            self._study = optuna.create_study(
                storage=store.optuna,
                study_name=name,
                direction="maximize",
                sampler=optuna.samplers.RandomSampler(),
                load_if_exists=True,
            )
            if self._study.metric_names is None:
                # ``Study.set_metric_names`` does the same, and warns that it is experimental.
                study_id = id_of_study(self._study)
                self._storage.set_study_system_attr(study_id, METRIC_NAMES_KEY, [OBJECTIVE_NAMES[objective]])

    @staticmethod
    def exists(name: str, store: Store) -> bool:
        """Return whether Optuna has a study with this name."""
        with storage_errors(store.label):
            return name in optuna.get_all_study_names(store.optuna)

    def settle(self, trials: Mapping[str, TrialRecord]) -> None:
        """Tell trials that an earlier, killed search left running or waiting, since no other process does.

        A trial whose end is among ``trials`` (by id) was killed just before it was told, the others while they ran.
        """
        with storage_errors(self._label):
            # Read from the database directly: Optuna's cache would read every trial of the study.
            study_id = self._storage.get_study_id_from_name(self._study.study_name)
            unfinished = self._storage.get_all_trials(study_id, False, (TrialState.RUNNING, TrialState.WAITING))
            for left in (trial for trial in unfinished if trial.state is TrialState.RUNNING):
                record = trials.get(left.user_attrs.get(TRIAL_ID_ATTRIBUTE, ""))
                if record is not None and record.outcome is not None:
                    state, value = state_and_value(record.candidate, record.outcome, self._objective)
                    self._check_lease()
                    self._study.tell(left.number, value, state)
                else:
                    self._study.tell(left.number, state=TrialState.FAIL)
            for _ in (trial for trial in unfinished if trial.state is TrialState.WAITING):
                self._study.tell(self._study.ask(), state=TrialState.FAIL)
            # Trials that were recorded in another database are not among Optuna's, which numbers the next one.
            last = max((trial.number for trial in trials.values()), default=-1)
            for _ in range(self._storage.get_n_trials(study_id), last + 1):
                self._study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))

    def ask(self, candidate: Candidate, stage: Stage = "search") -> OptunaTrial:
        """Write a trial of a candidate that is about to run."""
        return self._write(params_of(candidate, self._space), TrialState.RUNNING, {"stage": stage})

    def skip(self, params: Mapping[str, Any], why: str, excess: float | None) -> None:
        """Write a proposal of one of Optuna's samplers that is not run, as a trial that was pruned."""
        self._write(params, TrialState.PRUNED, {"stage": "search", "skipped": why}, constraint_attributes(excess))

    def _write(
        self,
        params: Mapping[str, Any],
        state: TrialState,
        attributes: Mapping[str, str],
        system_attributes: Mapping[str, Any] | None = None,
    ) -> OptunaTrial:
        trial_id, moment = new_id(), datetime.now()
        # Not by ``optuna.trial.create_trial``: the baseline's batch need not be one that samplers draw.
        trial = FrozenTrial(
            number=-1,
            trial_id=-1,
            state=state,
            value=None,
            datetime_start=moment,
            datetime_complete=moment if state.is_finished() else None,
            params=dict(params),
            distributions=self._space,
            user_attrs={TRIAL_ID_ATTRIBUTE: trial_id, **attributes},
            system_attrs=dict(system_attributes or {}),
            intermediate_values={},
        )
        self._check_lease()
        with storage_errors(self._label):
            row_id, number = create_trial(self._storage, id_of_study(self._study), trial)
        return OptunaTrial(trial_id, number, row_id)

    def describe(self, trial: OptunaTrial, candidate: Candidate, outcome: Outcome) -> None:
        """Set the attributes and the constraint of a trial that ended, so that only ``tell`` is left to do."""
        excess = over_line_gib(outcome, self._ceiling, candidate.arm)
        self._check_lease()
        with storage_errors(self._label):
            for name, value in _attributes(candidate, outcome).items():
                self._storage.set_trial_user_attr(trial.row_id, name, value)
            for name, value in constraint_attributes(excess).items():
                self._storage.set_trial_system_attr(trial.row_id, name, value)

    def tell(self, trial: OptunaTrial, candidate: Candidate, outcome: Outcome) -> None:
        """Tell how a trial ended. Out of memory is PRUNED with its constraint and no value; a fault is FAIL."""
        state, value = state_and_value(candidate, outcome, self._objective)
        self._check_lease()
        with storage_errors(self._label):
            self._storage.set_trial_state_values(trial.row_id, state, None if value is None else [value])


def state_and_value(candidate: Candidate, outcome: Outcome, objective: Objective) -> tuple[TrialState, float | None]:
    """Return what Optuna is told of an outcome."""
    if isinstance(outcome, Completed):
        batch = candidate.per_device_train_batch_size
        value = float(batch) if objective == "max-batch" else outcome.measurement.samples_per_second
        return TrialState.COMPLETE, value
    is_over = isinstance(outcome, OutOfMemory) and not outcome.disturbed
    return TrialState.PRUNED if is_over else TrialState.FAIL, None


def constraint_attributes(excess: float | None) -> dict[str, Any]:
    """Return how far a trial is above what is feasible, see ``over_line_gib``, under the name that Optuna chooses."""
    constraints = {} if excess is None else {CONSTRAINT: excess}
    return optuna.trial.create_trial(state=TrialState.FAIL, constraints=constraints).system_attrs


def over_line_gib(outcome: Outcome, ceiling: Ceiling, arm: Arm | None = None) -> float | None:
    """Return how far a trial is above what is feasible, in GiB; ``None`` for a fault, which says nothing.

    A trial that ran out needed more than the cap, so it was above the line by at least the headroom.
    """
    if isinstance(outcome, Completed):
        return outcome.measurement.excess_bytes(arm or Arm(), ceiling) / GIB
    if isinstance(outcome, OutOfMemory) and not outcome.disturbed:
        return max(1, ceiling.headroom_bytes, (outcome.peak_reserved_bytes or 0) - ceiling.line_bytes) / GIB
    return None


def _attributes(candidate: Candidate, outcome: Outcome) -> dict[str, float | str]:
    """Return flat numbers, which dashboards can plot, and the earlier trial they are from, if any."""
    attributes: dict[str, float | str] = {
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        "dataloader_num_workers": candidate.arm.dataloader_num_workers,
        "cpu_affinity": int(candidate.arm.cpu_affinity),
    }
    source = source_of(outcome)
    if source is not None:
        attributes |= {"stage": "reused", "reused_from": source.describe()}
    if isinstance(outcome, Completed):
        measured = outcome.measurement
        attributes["samples_per_second"] = measured.samples_per_second
        attributes["step_seconds"] = measured.step_seconds
        attributes["peak_reserved_gib"] = measured.peak_reserved_bytes / GIB
        if measured.joules_per_sample is not None:
            attributes["joules_per_sample"] = measured.joules_per_sample
        if measured.gpu_busy_share is not None:
            attributes["gpu_busy_share"] = measured.gpu_busy_share
        if measured.cpu_core is not None:
            attributes["cpu_core"] = measured.cpu_core
        if measured.skipped_steps is not None:
            attributes["skipped_steps"] = measured.skipped_steps
    elif isinstance(outcome, OutOfMemory) and outcome.peak_reserved_bytes is not None:
        attributes["peak_reserved_gib"] = outcome.peak_reserved_bytes / GIB
    return attributes
