"""Propose what one of Optuna's samplers does, as far as it is worth a trial."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from autotune.core.candidate import Candidate
from autotune.core.options import Objective, SamplerName
from autotune.core.stop import Stop, StopReason
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History
from autotune.space.space import Space
from autotune.tuning.optuna_space import candidate_of, params_of
from autotune.tuning.optuna_study import CONSTRAINT, over_line_gib, state_and_value

# After this many refused proposals in a row, a sampler is taken to have nothing new. A choice.
_MOST_REFUSALS = 64


class Skip(Protocol):
    """Records proposals that are not run."""

    def __call__(self, params: dict[str, Any], why: str, excess: float | None) -> None:
        """Record Optuna's parameters, why they are not run, and how far they are over the line if that is known."""


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
    warnings.filterwarnings("ignore", category=ExperimentalWarning, module=r"autotune\.tuning\.optuna_policy\Z")
    # The baseline's batch need not be one of the multiples that Optuna's samplers draw from. Before Python 3.12 the
    # warning counts as one of Optuna's own module.
    for module in (r"autotune\.tuning\.optuna_policy\Z", r"optuna\.trial\._trial\Z"):
        warnings.filterwarnings("ignore", message="Fixed parameter", module=module)
