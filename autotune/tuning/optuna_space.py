"""Map candidates to Optuna's parameters, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.core.candidate import Arm, Candidate
from autotune.core.options import OPTUNA_SAMPLERS, SamplerName
from autotune.space.levers import BY_NAME, LEVERS, changed
from autotune.space.space import Space

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
