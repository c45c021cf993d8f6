"""Record a search in an Optuna study by ask and tell: parameters, value, constraint and attributes of each trial."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import InMemoryStorage
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
from autotune.tuning.sampler import PolicySampler, params_of

# The constraint: GiB above the line of a feasible trial; 0 or less is feasible.
CONSTRAINT = "memory_over_line_gib"
_THIS_MODULE = re.escape(__name__) + r"\Z"


@dataclass(frozen=True)
class Asked:
    """A trial that Optuna proposed, and that has not been told yet."""

    trial_id: str
    number: int
    """Optuna's number of the trial within the study."""
    params: dict[str, Any]
    """The proposed candidate."""
    row_id: int
    """The key of the trial in Optuna's tables."""
    proposal: optuna.Trial
    """The same trial in the sampler's own study."""


class OptunaStudy:
    """Ask and tell of one study, which is created if it does not exist.

    The sampler works on a copy of the study in memory. Optuna writes each parameter of a trial in its own transaction
    when it is asked for a trial; here the trial is written as a whole once the sampler has proposed it.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        sampler: optuna.samplers.BaseSampler,
        space: dict[str, BaseDistribution],
        objective: Objective,
        ceiling: Ceiling,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _ignore_warnings()
        self._space = space
        self._objective = objective
        self._ceiling = ceiling
        self._label = store.label
        # Optuna's own tables know nothing of leases, so that is asked before each of its writes.
        self._check_lease = store.check_lease
        self._storage = store.optuna
        self.sampler = sampler
        self._copy: optuna.Study | None = None
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
                    state, value = self._state_and_value(record.candidate, record.outcome)
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

    def ask(self, forced: Candidate | None = None, stage: Stage = "search") -> Asked:
        """Return the next proposal, or ``forced`` as if it had been proposed."""
        self._check_lease()
        with storage_errors(self._label):
            if self._copy is None:
                self._copy = self._copy_study()
            if forced is not None:
                self._copy.enqueue_trial(params_of(forced, self._space))
            proposal = self._copy.ask(self._space)
            trial_id = new_id()
            proposal.set_user_attr(TRIAL_ID_ATTRIBUTE, trial_id)
            proposal.set_user_attr("stage", stage)
            row_id, number = create_trial(self._storage, id_of_study(self._study), self._frozen(proposal))
            return Asked(trial_id, number, proposal.params, row_id, proposal)

    def _copy_study(self) -> optuna.Study:
        """Return a study in memory for the sampler, with the recorded trials where the sampler learns from them."""
        storage = InMemoryStorage()
        study = optuna.create_study(storage=storage, direction="maximize", sampler=self.sampler)
        if not isinstance(self.sampler, PolicySampler):
            # Study.add_trial would refuse a baseline that is not among the values of the search space.
            for trial in self._study.get_trials(deepcopy=False):
                storage.create_new_trial(id_of_study(study), trial)
        return study

    def _frozen(self, proposal: optuna.Trial) -> FrozenTrial:
        """Return a trial as it is in the sampler's study."""
        assert self._copy is not None
        return self._copy.get_trials(deepcopy=False)[proposal.number]

    def describe(self, asked: Asked, candidate: Candidate, outcome: Outcome) -> None:
        """Set the attributes and the constraint of a trial that ended, so that only ``tell`` is left to do."""
        excess = over_line_gib(outcome, self._ceiling, candidate.arm)
        self._set_attributes(asked, _attributes(candidate, outcome), excess)

    def _set_attributes(self, asked: Asked, attributes: Mapping[str, float | str], excess: float | None) -> None:
        self._check_lease()
        with storage_errors(self._label):
            for name, value in attributes.items():
                asked.proposal.set_user_attr(name, value)
                self._storage.set_trial_user_attr(asked.row_id, name, value)
            if excess is not None:
                before = set(self._frozen(asked.proposal).system_attrs)
                _constrain(asked.proposal, excess)
                # Optuna chooses the key.
                after = self._frozen(asked.proposal).system_attrs
                for name in after.keys() - before:
                    self._storage.set_trial_system_attr(asked.row_id, name, after[name])

    def tell(self, asked: Asked, candidate: Candidate, outcome: Outcome) -> None:
        """Tell how a trial ended. Out of memory is PRUNED with its constraint and no value; a fault is FAIL."""
        self._tell_asked(asked, *self._state_and_value(candidate, outcome))

    def skip(self, asked: Asked, why: str, known: Outcome | None = None) -> None:
        """Tell that a proposal was not run, because its result is ``known`` or it is not wanted."""
        excess = over_line_gib(known, self._ceiling) if known is not None else None
        self._set_attributes(asked, {"skipped": why}, excess)
        self._tell_asked(asked, TrialState.PRUNED, None)

    def _tell_asked(self, asked: Asked, state: TrialState, value: float | None) -> None:
        assert self._copy is not None
        self._check_lease()
        with storage_errors(self._label):
            self._copy.tell(asked.proposal, value, state)
            self._storage.set_trial_state_values(asked.row_id, state, None if value is None else [value])

    def _state_and_value(self, candidate: Candidate, outcome: Outcome) -> tuple[TrialState, float | None]:
        if isinstance(outcome, Completed):
            batch = candidate.per_device_train_batch_size
            value = float(batch) if self._objective == "max-batch" else outcome.measurement.samples_per_second
            return TrialState.COMPLETE, value
        is_over = isinstance(outcome, OutOfMemory) and not outcome.disturbed
        return TrialState.PRUNED if is_over else TrialState.FAIL, None


def _name_objective(study: optuna.Study, name: str) -> None:
    study.set_metric_names([name])


def _constrain(trial: optuna.Trial, excess: float) -> None:
    trial.set_constraint(CONSTRAINT, excess)


def _ignore_warnings() -> None:
    """Suppress two warnings of Optuna that this module causes, from now on.

    Not with ``warnings.catch_warnings``, which changes what all threads of the process show.
    """
    warnings.filterwarnings("ignore", category=ExperimentalWarning, module=_THIS_MODULE)
    # The baseline's batch need not be one of the multiples that Optuna's samplers draw from. Before Python 3.12 the
    # warning counts as one of Optuna's own module.
    for module in (_THIS_MODULE, r"optuna\.trial\._trial\Z"):
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
