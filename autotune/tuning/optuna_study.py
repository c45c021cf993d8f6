"""Drive a search by Optuna: a study in memory is asked what to run, and told how it ended.

Its sampler proposes what the plan has next. Where one of Optuna's own samplers was chosen, the plan has what is due,
such as the baseline and what is measured again, and that sampler draws all else. Candidates are mapped to Optuna's
parameters and back. Records are in autotune's tables alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Arm, Candidate
from autotune.core.options import OPTUNA_SAMPLERS, SamplerName
from autotune.core.outcome import Outcome
from autotune.estimate.feasibility import Judge
from autotune.results.optuna_trials import CONSTRAINT, over_line_gib, state_and_value
from autotune.space.arms import changed
from autotune.space.levers import BY_NAME, LEVERS
from autotune.space.space import Space
from autotune.tuning.plan import DRAW, Plan, Step
from autotune.tuning.prepare import Prepared


class PlanSampler(BaseSampler):
    """Proposes the candidate that a plan has next; where the plan has none, another sampler draws one."""

    def __init__(self, kinds: dict[str, BaseDistribution], other: BaseSampler) -> None:
        """Take the distributions of Optuna's parameters by name, and the other sampler."""
        self._kinds, self._other = kinds, other
        self.next: Candidate | None = None
        """The candidate to propose; ``None`` where the other sampler is to draw one."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters to sample at once: all of a proposed candidate; see ``BaseSampler``."""
        return self._kinds if self.next is not None else self._other.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values of the proposed candidate, or of the other sampler; see ``BaseSampler``."""
        if self.next is not None:
            params = params_of(self.next, self._kinds)
            # A value that the study does not know is left to be drawn; the trial is then reported as failed.
            kinds = {name: kind for name, kind in self._kinds.items() if isinstance(kind, CategoricalDistribution)}
            return {name: each for name, each in params.items() if name not in kinds or each in kinds[name].choices}
        return self._other.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Have the other sampler draw a parameter that has no value yet; see ``BaseSampler``."""
        return self._other.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Pass the event to the other sampler; see ``BaseSampler``."""
        self._other.before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """Pass the event to the other sampler; see ``BaseSampler``."""
        self._other.after_trial(study, trial, state, values)


class OptunaStudy:
    """Optuna's study of one search, which is asked for every trial and told how the trial ended."""

    def __init__(self, prepared: Prepared, plan: Plan, *, seed: int = 0, is_parallel: bool = False) -> None:
        # Not silenced with ``warnings.catch_warnings``, which changes what all threads of the process show.
        warnings.filterwarnings("ignore", category=ExperimentalWarning, module=r"autotune\.tuning\.optuna_study\Z")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        request, self._space, self._plan = prepared.request, prepared.space, plan
        self._objective, self._ceiling = request.objective, prepared.ceiling
        self._kinds = distributions(prepared.space, prepared.baseline, request.sampler)
        # Samplers are not stored, so that the caller gives a resumed search another seed. autotune's own uses none.
        other: BaseSampler = optuna.samplers.RandomSampler(seed=seed)
        if request.sampler == "tpe":
            # ``constant_liar`` has it avoid the candidates of running trials.
            other = optuna.samplers.TPESampler(seed=seed, constant_liar=is_parallel)
        self._sampler = PlanSampler(self._kinds, other)
        self._study = optuna.create_study(direction="maximize", sampler=self._sampler)

    def ask(self) -> tuple[Step, optuna.Trial] | None:
        """Return the next step with its Optuna trial; ``None`` where the plan has none now.

        Optuna's own samplers know neither memory nor earlier trials. The judge may refuse the candidates that they
        draw. These are not run, but reported to Optuna as pruned, with the GiB by which they exceed the memory. So is a
        combination of parameters that is no candidate.
        """
        while (step := self._plan.next()) is not None:
            self._sampler.next = step.candidate if step != DRAW else None
            trial = self._study.ask(self._kinds)
            if step != DRAW:
                return step, trial
            candidate = candidate_of(trial.params, self._space)
            history = self._plan.history
            judge, too_large = Judge(self._space, history), None
            may_run = candidate is not None and judge.is_in_turn(candidate)
            self._plan.drawn(is_refused=not may_run)
            if candidate is not None:
                if may_run:
                    return Step("search", candidate), trial
                # A trial out of memory that needed no more than this candidate.
                too_large = history.ruled_out_by(candidate) if judge.is_new(candidate) else None
            excess_gib = over_line_gib(too_large.outcome, self._ceiling) if too_large else None
            self._report(trial, TrialState.PRUNED, None, excess_gib)
        return None

    def tell(self, trial: optuna.Trial, candidate: Candidate, outcome: Outcome) -> None:
        """Report a trial's outcome to Optuna. A candidate outside of Optuna's parameters is reported as failed."""
        if trial.params != params_of(candidate, self._kinds):
            self._study.tell(trial, state=TrialState.FAIL)
            return
        state, value = state_and_value(candidate, outcome, self._objective)
        self._report(trial, state, value, over_line_gib(outcome, self._ceiling, candidate.arm))

    def _report(self, trial: optuna.Trial, state: TrialState, value: float | None, excess_gib: float | None) -> None:
        """Report a trial's end to Optuna, with the GiB by which it exceeds the memory line; ``None`` if unknown."""
        if excess_gib is not None:
            trial.set_constraint(CONSTRAINT, excess_gib)
        self._study.tell(trial, value, state)

    def know(self, trials: Iterable[tuple[Candidate, Outcome]]) -> None:
        """Report trials from before this search to Optuna, in a continued study."""
        for candidate, outcome in trials:
            self._sampler.next = candidate
            self.tell(self._study.ask(self._kinds), candidate, outcome)


# Optuna's samplers draw free batches up to this; nearly all larger ones would be out of memory.
_FOREIGN_LARGEST_FREE_BATCH = 1024
# They draw among so many values at least: with a large multiple, fewer would be below the limit above.
_FOREIGN_FEWEST_FREE_BATCHES = 16


def distributions(space: Space, baseline: Candidate, sampler: SamplerName) -> dict[str, BaseDistribution]:
    """Return the Optuna search space, which is the same for every trial of a study, the baseline included.

    Accumulation is not a parameter: the effective batch determines it, which Optuna cannot express. Exported trials
    have it as a user attribute.
    """
    # Levers that are only tried after the first answer are parameters from the start.
    late = [BY_NAME[name] for name in space.late if BY_NAME[name].option]
    variants = (changed(arm, **{row.name: value}) for arm in space.arms for row in late for value in row.values)
    arms = (*space.arms, baseline.arm, *variants)
    batches = space.batches
    batch: BaseDistribution
    if batches.effective_batch is None:
        is_own = sampler not in OPTUNA_SAMPLERS
        step = 1 if is_own else batches.levels()[0]
        most = batches.most if is_own else max(_FOREIGN_LARGEST_FREE_BATCH, _FOREIGN_FEWEST_FREE_BATCHES * step)
        # Trimmed, since Optuna warns where the step does not lead exactly to the end.
        batch = IntDistribution(step, min(most, batches.most) // step * step, step=step)
    else:
        batch = CategoricalDistribution(sorted({*batches.every, baseline.per_device_train_batch_size}))
    return {
        "per_device_train_batch_size": batch,
        **{name: CategoricalDistribution(_values(arms, name)) for name in _searched(arms)},
    }


def _values(arms: tuple[Arm, ...], name: str) -> list[Any]:
    """Return the values of a setting among the arms, sorted; ``None``, as of no strategy, cannot be and comes first."""
    values = {getattr(arm, name) for arm in arms}
    return [*({None} & values), *sorted(values - {None})]


def _searched(arms: tuple[Arm, ...]) -> list[str]:
    """Return the names of the settings that are Optuna parameters, without data loader workers and CPU pinning.

    Nor the multiple of lengths: its values follow from the samples, and Optuna's values are fixed at the start.
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
    # Other settings of several ranks follow from the strategy, and are no parameters of Optuna's.
    arms = (arm for arm in space.arms if all(getattr(arm, name) == value for name, value in chosen.items()))
    arm = next(arms, None)
    return None if arm is None else space.candidate(arm, batch)


def params_of(candidate: Candidate, kinds: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Return a candidate as Optuna's parameters, of which there are the ``kinds``."""
    parameters = candidate.parameters()
    return {name: parameters[name] for name in kinds}
