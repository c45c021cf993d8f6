"""Record a search in autotune's tables and in an Optuna study, and propose what one of Optuna's samplers does.

A candidate is mapped to Optuna's parameters, and back; a trial has a value, a constraint and attributes there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.options import OPTUNA_SAMPLERS, Objective, SamplerName
from autotune.core.outcome import Completed, Outcome, OutOfMemory, source_of
from autotune.core.stop import Stop, StopReason
from autotune.core.units import GIB
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History
from autotune.space.levers import BY_NAME, LEVERS, changed
from autotune.space.space import Space
from autotune.store.engine import storage_errors
from autotune.store.optuna_private import METRIC_NAMES_KEY, create_trial, id_of_study
from autotune.store.records import OBJECTIVE_NAMES, TRIAL_ID_ATTRIBUTE, Stage, StudyRecord, TrialRecord, new_id
from autotune.store.repository import Store

# The constraint: GiB above the line of a feasible trial; 0 or less is feasible.
CONSTRAINT = "memory_over_line_gib"


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
        self._rows: dict[str, int] = {}
        """The keys of trials in Optuna's tables, by their ids."""
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

    def ask(self, candidate: Candidate, stage: Stage = "search") -> tuple[str, int]:
        """Write a trial of a candidate that is about to run; return its id, and its number within the study."""
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
    ) -> tuple[str, int]:
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
            self._rows[trial_id], number = create_trial(self._storage, id_of_study(self._study), trial)
        return trial_id, number

    def describe(self, trial_id: str, candidate: Candidate, outcome: Outcome) -> None:
        """Set the attributes and the constraint of a trial that ended, so that only ``tell`` is left to do."""
        excess = over_line_gib(outcome, self._ceiling, candidate.arm)
        self._check_lease()
        with storage_errors(self._label):
            for name, value in _attributes(candidate, outcome).items():
                self._storage.set_trial_user_attr(self._rows[trial_id], name, value)
            for name, value in constraint_attributes(excess).items():
                self._storage.set_trial_system_attr(self._rows[trial_id], name, value)

    def tell(self, trial_id: str, candidate: Candidate, outcome: Outcome) -> None:
        """Tell how a trial ended. Out of memory is PRUNED with its constraint and no value; a fault is FAIL."""
        state, value = state_and_value(candidate, outcome, self._objective)
        self._check_lease()
        with storage_errors(self._label):
            self._storage.set_trial_state_values(self._rows[trial_id], state, None if value is None else [value])


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
        for name in ("joules_per_sample", "gpu_busy_share", "cpu_core", "skipped_steps"):
            if (value := getattr(measured, name)) is not None:
                attributes[name] = value
    elif isinstance(outcome, OutOfMemory) and outcome.peak_reserved_bytes is not None:
        attributes["peak_reserved_gib"] = outcome.peak_reserved_bytes / GIB
    return attributes


# Optuna's samplers draw free batches up to this; nearly all larger ones would be out of memory.
_FOREIGN_LARGEST_FREE_BATCH = 1024
# With a large multiple, that would leave them few values.
_FOREIGN_FEWEST_FREE_BATCHES = 16


def distributions(space: Space, baseline: Candidate, sampler: SamplerName) -> dict[str, BaseDistribution]:
    """Return the Optuna search space, which is the same for every trial of a study, the baseline included.

    Accumulation is not a parameter: the effective batch determines it, which Optuna cannot express. It is recorded as a
    user attribute.
    """
    late = [BY_NAME[name] for name in space.late if BY_NAME[name].option]
    variants = (changed(arm, **{row.name: value}) for arm in space.arms for row in late for value in row.values)
    arms = (*space.arms, baseline.arm, *variants)
    batches = space.batches
    batch: BaseDistribution
    if batches.effective_batch is None:
        own = sampler not in OPTUNA_SAMPLERS
        step = 1 if own else batches.levels()[0]
        most = batches.most if own else max(_FOREIGN_LARGEST_FREE_BATCH, _FOREIGN_FEWEST_FREE_BATCHES * step)
        # Trimmed, since Optuna warns where the step does not lead exactly to the end.
        batch = IntDistribution(step, min(most, batches.most) // step * step, step=step)
    else:
        rungs = {b for level in batches.levels() for b in batches.at_level(level)}
        batch = CategoricalDistribution(sorted(rungs | {baseline.per_device_train_batch_size}))
    return {
        "per_device_train_batch_size": batch,
        **{name: CategoricalDistribution(_values(arms, name)) for name in _searched(arms)},
    }


def _values(arms: tuple[Arm, ...], name: str) -> list[Any]:
    """Return the values of a lever in order; ``None`` first, as a lone GPU has beside ``zero2-offload``."""
    values = {getattr(arm, name) for arm in arms}
    return [*({None} & values), *sorted(values - {None})]


def _searched(arms: tuple[Arm, ...]) -> list[str]:
    """Return the names of the settings that are parameters, without workers and pinning of the winner.

    Nor the multiple of lengths, whose values follow from the samples: Optuna takes no other values than those at first.
    """
    return [
        row.name
        for row in LEVERS
        if row.is_optunas or (row.values and row.name != "length_multiple" and len(_values(arms, row.name)) > 1)
    ]


def candidate_of(params: Mapping[str, Any], space: Space) -> Candidate | None:
    """Return the candidate of Optuna's parameters; ``None`` where the space does not contain it."""
    batch = int(params["per_device_train_batch_size"])
    if not space.batches.valid(batch):
        return None
    chosen = {name: value for name, value in params.items() if name != "per_device_train_batch_size"}
    # What several ranks have besides follows from the strategy, and is no parameter of Optuna's.
    arms = (arm for arm in space.arms if all(getattr(arm, name) == value for name, value in chosen.items()))
    arm = next(arms, None)
    return None if arm is None else space.candidate(arm, batch)


def params_of(candidate: Candidate, names: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Return a candidate as Optuna's parameters."""
    parameters = candidate.parameters()
    return {name: parameters[name] for name in names}


# After this many refused proposals in a row, a sampler is taken to have nothing new. A choice.
_MOST_REFUSALS = 64


Skip = Callable[[dict[str, Any], str, float | None], None]
"""Records Optuna's parameters that are not run, why, and how far they are over the line if that is known."""


class OptunaPolicy:
    """A policy that asks a sampler of Optuna in a study in memory, which learns from every trial of the search.

    The sampler knows neither memory nor what was tried, so ``Judge`` refuses much of what it proposes.
    """

    ending = Stop(StopReason.NOTHING_NEW, f"the sampler proposed nothing new {_MOST_REFUSALS} times in a row")

    def __init__(
        self,
        sampler: BaseSampler,
        space: Space,
        names: dict[str, BaseDistribution],
        objective: Objective,
        skip: Skip,
    ) -> None:
        _ignore_warnings()
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._space, self._names, self._objective, self._skip = space, names, objective, skip
        self._proposals: dict[Candidate, optuna.Trial] = {}
        """Proposals whose end the sampler has not learned."""
        self._learned = 0
        self._is_spent = False

    def next(self, history: History) -> Candidate | None:
        """See ``Policy.next``."""
        self._learn(history)
        judge = Judge(self._space, history)
        # A proposal waits where something else was run instead.
        waiting = [candidate for candidate in self._proposals if judge.refusal(candidate) is None]
        if waiting:
            return waiting[0]
        if self._is_spent:
            return None
        for _ in range(_MOST_REFUSALS):
            proposal = self._study.ask(self._names)
            candidate = candidate_of(proposal.params, self._space)
            refusal = judge.refusal(candidate)
            if candidate is not None and refusal is None:
                self._proposals[candidate] = proposal
                return candidate
            why, outcome = (refusal.why, refusal.known) if refusal is not None else ("", None)
            excess = over_line_gib(outcome, history.ceiling) if outcome is not None else None
            self._tell(proposal, TrialState.PRUNED, None, excess)
            self._skip(proposal.params, why, excess)
        # The end of a running trial may make a refused candidate worth a trial.
        self._is_spent = not history.pending
        return None

    def _learn(self, history: History) -> None:
        """Tell the sampler of the trials that ended since the last time, whoever proposed them."""
        for tried in history.tried[self._learned :]:
            proposal = self._proposals.pop(tried.candidate, None)
            if proposal is None:
                self._study.enqueue_trial(params_of(tried.candidate, self._names))
                proposal = self._study.ask(self._names)
            state, value = state_and_value(tried.candidate, tried.outcome, self._objective)
            excess = over_line_gib(tried.outcome, history.ceiling, tried.candidate.arm)
            self._tell(proposal, state, value, excess)
        self._learned = len(history.tried)

    def _tell(self, proposal: optuna.Trial, state: TrialState, value: float | None, excess: float | None) -> None:
        if excess is not None:
            proposal.set_constraint(CONSTRAINT, excess)
        self._study.tell(proposal, value, state)


def make_sampler(name: SamplerName, seed: int, *, is_parallel: bool) -> BaseSampler:
    """Return Optuna's sampler of that name.

    Samplers are not stored, so a resumed search needs another ``seed``. ``is_parallel`` makes TPE avoid the candidates
    of running trials.
    """
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=is_parallel)
    return optuna.samplers.RandomSampler(seed=seed)


def _ignore_warnings() -> None:
    """Suppress two warnings of Optuna that the policy causes, from now on.

    Not with ``warnings.catch_warnings``, which changes what all threads of the process show.
    """
    warnings.filterwarnings("ignore", category=ExperimentalWarning, module=r"autotune\.tuning\.optuna_study\Z")
    # The baseline's batch need not be one of the multiples that Optuna's samplers draw from. Before Python 3.12 the
    # warning counts as one of Optuna's own module.
    for module in (r"autotune\.tuning\.optuna_study\Z", r"optuna\.trial\._trial\Z"):
        warnings.filterwarnings("ignore", message="Fixed parameter", module=module)


class StudyRecorder:
    """The records of one study while it is searched."""

    def __init__(self, study: StudyRecord, store: Store, optuna_study: OptunaStudy) -> None:
        self.study = study
        """The study as it was last written."""
        self._store = store
        self._optuna = optuna_study

    def finish(self, record: TrialRecord, outcome: Outcome, seconds: float) -> TrialRecord:
        """Record how a trial ended; return it with its end.

        Killed between any two of these, the next run of the study can still set right what is missing.
        """
        self._optuna.describe(record.id, record.candidate, outcome)
        self._store.finish_trial(record.id, outcome, seconds)
        self._optuna.tell(record.id, record.candidate, outcome)
        return replace(record, outcome=outcome, seconds=seconds)

    def reuse(self, record: TrialRecord, outcome: Outcome) -> TrialRecord:
        """Record an earlier trial's outcome as that of this one, which need not run; return it with its end."""
        ended = replace(record, stage="reused", outcome=outcome, seconds=0.0, log_path=None)
        self._optuna.describe(ended.id, ended.candidate, outcome)
        self._store.start_trial(ended)
        self._optuna.tell(ended.id, ended.candidate, outcome)
        return ended

    def write(self, **changes: Any) -> None:
        """Record other values of fields of the study."""
        self.study = replace(self.study, **changes)
        self._store.update_study(self.study)
