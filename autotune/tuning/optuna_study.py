"""Record a search in an Optuna study: parameters, value, constraint and attributes of each trial."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Arm, Candidate
from autotune.core.options import Objective
from autotune.core.outcome import Completed, Outcome, OutOfMemory, source_of
from autotune.core.units import GIB
from autotune.devices import Ceiling
from autotune.store.engine import storage_errors
from autotune.store.optuna_private import create_trial, id_of_study
from autotune.store.records import OBJECTIVE_NAMES, TRIAL_ID_ATTRIBUTE, Stage, TrialRecord, new_id
from autotune.store.repository import Store
from autotune.tuning.optuna_space import params_of

# The constraint: GiB above the line of a feasible trial; 0 or less is feasible.
CONSTRAINT = "memory_over_line_gib"
# ``optuna_policy`` causes the same.
_WARNED_MODULES = r"autotune\.tuning\.optuna_(study|policy)\Z"


@dataclass(frozen=True)
class OptunaTrial:
    """A trial in Optuna's tables that has not ended."""

    trial_id: str
    number: int
    """Optuna's number of the trial within the study."""
    row_id: int
    """The key of the trial in Optuna's tables."""
    draft: optuna.Trial
    """The same trial in memory."""


class OptunaStudy:
    """The trials of one study in Optuna's tables. The study is created if it does not exist.

    Each trial is enqueued, asked for and told in a study in memory too. Optuna writes each parameter of a trial in its
    own transaction when it is asked for a trial; here the trial is written as a whole.
    """

    def __init__(
        self, name: str, store: Store, space: dict[str, BaseDistribution], objective: Objective, ceiling: Ceiling
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        ignore_warnings()
        self._space = space
        self._objective = objective
        self._ceiling = ceiling
        self._label = store.label
        # Optuna's own tables know nothing of leases, so that is asked before each of its writes.
        self._check_lease = store.check_lease
        self._storage = store.optuna
        # Every parameter is given, so that no sampler draws any.
        sampler = optuna.samplers.RandomSampler()
        self._drafts = optuna.create_study(direction="maximize", sampler=sampler)
        with storage_errors(self._label):
            self._study = optuna.create_study(
                storage=store.optuna, study_name=name, direction="maximize", sampler=sampler, load_if_exists=True
            )
            if self._study.metric_names is None:
                _name_objective(self._study, OBJECTIVE_NAMES[objective])

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
        return self._write(self._draft(params_of(candidate, self._space), stage))

    def skip(self, params: Mapping[str, Any], why: str, excess: float | None) -> None:
        """Write a proposal of one of Optuna's samplers that is not run, as a trial that was pruned."""
        draft = self._draft(params, "search")
        draft.set_user_attr("skipped", why)
        if excess is not None:
            constrain(draft, excess)
        self._drafts.tell(draft, state=TrialState.PRUNED)
        self._write(draft)

    def _draft(self, params: Mapping[str, Any], stage: Stage) -> optuna.Trial:
        draft = draft_trial(self._drafts, params, self._space)
        draft.set_user_attr(TRIAL_ID_ATTRIBUTE, new_id())
        draft.set_user_attr("stage", stage)
        return draft

    def _write(self, draft: optuna.Trial) -> OptunaTrial:
        self._check_lease()
        with storage_errors(self._label):
            row_id, number = create_trial(self._storage, id_of_study(self._study), self._frozen(draft))
        return OptunaTrial(draft.user_attrs[TRIAL_ID_ATTRIBUTE], number, row_id, draft)

    def _frozen(self, draft: optuna.Trial) -> FrozenTrial:
        return self._drafts.get_trials(deepcopy=False)[draft.number]

    def describe(self, trial: OptunaTrial, candidate: Candidate, outcome: Outcome) -> None:
        """Set the attributes and the constraint of a trial that ended, so that only ``tell`` is left to do."""
        excess = over_line_gib(outcome, self._ceiling, candidate.arm)
        self._check_lease()
        with storage_errors(self._label):
            for name, value in _attributes(candidate, outcome).items():
                trial.draft.set_user_attr(name, value)
                self._storage.set_trial_user_attr(trial.row_id, name, value)
            if excess is not None:
                before = set(self._frozen(trial.draft).system_attrs)
                constrain(trial.draft, excess)
                # Optuna chooses the key.
                after = self._frozen(trial.draft).system_attrs
                for name in after.keys() - before:
                    self._storage.set_trial_system_attr(trial.row_id, name, after[name])

    def tell(self, trial: OptunaTrial, candidate: Candidate, outcome: Outcome) -> None:
        """Tell how a trial ended. Out of memory is PRUNED with its constraint and no value; a fault is FAIL."""
        state, value = state_and_value(candidate, outcome, self._objective)
        self._check_lease()
        with storage_errors(self._label):
            self._drafts.tell(trial.draft, value, state)
            self._storage.set_trial_state_values(trial.row_id, state, None if value is None else [value])


def draft_trial(study: optuna.Study, params: Mapping[str, Any], space: dict[str, BaseDistribution]) -> optuna.Trial:
    """Have a study in memory propose ``params``, whatever its sampler."""
    study.enqueue_trial(dict(params))
    return study.ask(space)


def state_and_value(candidate: Candidate, outcome: Outcome, objective: Objective) -> tuple[TrialState, float | None]:
    """Return what Optuna is told of an outcome."""
    if isinstance(outcome, Completed):
        batch = candidate.per_device_train_batch_size
        value = float(batch) if objective == "max-batch" else outcome.measurement.samples_per_second
        return TrialState.COMPLETE, value
    is_over = isinstance(outcome, OutOfMemory) and not outcome.disturbed
    return TrialState.PRUNED if is_over else TrialState.FAIL, None


def _name_objective(study: optuna.Study, name: str) -> None:
    study.set_metric_names([name])


def constrain(trial: optuna.Trial, excess: float) -> None:
    """Set how far a trial is above what is feasible; see ``over_line_gib``."""
    trial.set_constraint(CONSTRAINT, excess)


def ignore_warnings() -> None:
    """Suppress two warnings of Optuna that this package causes, from now on.

    Not with ``warnings.catch_warnings``, which changes what all threads of the process show.
    """
    warnings.filterwarnings("ignore", category=ExperimentalWarning, module=_WARNED_MODULES)
    # The baseline's batch need not be one of the multiples that Optuna's samplers draw from. Before Python 3.12 the
    # warning counts as one of Optuna's own module.
    for module in (_WARNED_MODULES, r"optuna\.trial\._trial\Z"):
        warnings.filterwarnings("ignore", message="Fixed parameter", module=module)


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
