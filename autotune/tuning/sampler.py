"""Optuna samplers for a search: our own, driven by a policy, and Optuna's by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotune.core.candidate import Arm, Candidate
from autotune.core.options import SamplerName
from autotune.estimate.history import History
from autotune.space.space import Space
from autotune.tuning.policy import Policy

# Optuna's own samplers draw a free batch from here; beyond it nearly all draws would be out of memory.
_FOREIGN_LARGEST_FREE_BATCH = 1024
# With a large strict multiple that would leave them little to choose from.
_FOREIGN_FEWEST_FREE_BATCHES = 16

_LEVERS = ("expandable_segments", "torch_compile", "use_liger_kernel")


def distributions(space: Space, baseline: Candidate, sampler: SamplerName) -> dict[str, BaseDistribution]:
    """The Optuna search space: the same for every trial of a study, the baseline included.

    Accumulation is no parameter of its own: the effective batch fixes it, and Optuna has no way to
    say so. It is recorded as a user attribute.
    """
    arms = (*space.arms, baseline.arm)
    batches = space.batches
    batch: BaseDistribution
    if batches.effective_batch is None:
        own = sampler in ("autotune", "grid")
        step = 1 if own else batches.levels()[0]
        most = batches.most if own else max(_FOREIGN_LARGEST_FREE_BATCH, _FOREIGN_FEWEST_FREE_BATCHES * step)
        # Trimmed here, since Optuna warns where the step does not lead to the end.
        batch = IntDistribution(step, min(most, batches.most) // step * step, step=step)
    else:
        rungs = {b for level in batches.levels() for b in batches.at_level(level)}
        batch = CategoricalDistribution(sorted(rungs | {baseline.per_device_train_batch_size}))
    return {
        "per_device_train_batch_size": batch,
        "precision": CategoricalDistribution(sorted({arm.precision for arm in arms})),
        "gradient_checkpointing": CategoricalDistribution(sorted({arm.gradient_checkpointing for arm in arms})),
        "attn_implementation": CategoricalDistribution(sorted({arm.attn_implementation for arm in arms})),
        "optim": CategoricalDistribution(sorted({arm.optim for arm in arms})),
        **{name: CategoricalDistribution(sorted({getattr(arm, name) for arm in arms})) for name in _levers(arms)},
    }


def _levers(arms: tuple[Arm, ...]) -> tuple[str, ...]:
    """Names of parameters that are on or off. One that is tried with the winner alone is none of Optuna's."""
    return (*_LEVERS, *(["cpu_affinity"] if any(arm.cpu_affinity for arm in arms) else []))


def candidate_of(params: Mapping[str, Any], space: Space) -> Candidate | None:
    """The candidate that Optuna's parameters stand for; ``None`` where the space does not hold it."""
    batch = int(params["per_device_train_batch_size"])
    if not space.batches.valid(batch):
        return None
    candidate = Candidate.from_parameters({**params, "gradient_accumulation_steps": space.batches.accumulation(batch)})
    return candidate if space.contains(candidate) else None


def params_of(candidate: Candidate, names: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """The inverse: a candidate as Optuna's parameters."""
    parameters = candidate.parameters()
    return {name: parameters[name] for name in names}


class PolicySampler(BaseSampler):
    """An Optuna sampler that proposes what a policy asks for next.

    ``upcoming`` tells the next candidate, or ``None`` when the policy has seen enough: look before
    ``study.ask``.
    """

    def __init__(self, policy: Policy, history: History, search_space: dict[str, BaseDistribution]) -> None:
        self._policy = policy
        self._history = history
        self._search_space = search_space

    def upcoming(self) -> Candidate | None:
        """What the next ``ask`` will propose."""
        return self._policy.next(self._history)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Always the whole space."""
        return self._search_space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The policy's candidate, as parameters; nothing for a trial that was enqueued."""
        if "fixed_params" in trial.system_attrs:
            return {}
        candidate = self.upcoming()
        if candidate is None:
            raise RuntimeError("the policy has no candidate left; upcoming() says so before ask()")
        return params_of(candidate, self._search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never reached by this project: every parameter is in the relative space."""
        raise RuntimeError(f"{param_name} is no parameter of this search")


def make_sampler(
    name: SamplerName,
    policy: Policy | None,
    history: History,
    search_space: dict[str, BaseDistribution],
    seed: int,
) -> BaseSampler:
    """The sampler of that name, or that of a policy. Optuna's are not persisted, so resuming seeds them anew."""
    if policy is not None:
        return PolicySampler(policy, history, search_space)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed + len(history.tried))
    return optuna.samplers.RandomSampler(seed=seed + len(history.tried))
