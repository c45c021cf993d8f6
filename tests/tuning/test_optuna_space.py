"""Test Optuna's search space and parameters."""

from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from searching import arms

from autotune.core.candidate import Arm, Candidate
from autotune.core.options import SamplerName
from autotune.space.levers import with_lever
from autotune.space.space import LARGEST_FREE_BATCH, Batches, Space
from autotune.tuning.optuna_study import (
    candidate_of,
    distributions,
    params_of,
)

SAMPLERS = get_args(SamplerName)
SPACE = Space(arms("bf16", "tf32"), Batches(64))
BASELINE = SPACE.baseline("sdpa")


def every_candidate(space: Space) -> list[Candidate]:
    batches = [b for level in space.batches.levels() for b in space.batches.at_level(level)]
    return [space.candidate(arm, batch) for arm in space.arms for batch in batches]


def contains(space: dict[str, BaseDistribution], params: dict[str, Any]) -> bool:
    return all(space[name]._contains(space[name].to_internal_repr(value)) for name, value in params.items())


class TestDistributions:
    @given(st.integers(1, 512), st.sampled_from(SAMPLERS))
    def test_hold_every_candidate_and_the_baseline(self, effective_batch: int, sampler: SamplerName) -> None:
        space = Space(arms("bf16", "tf32"), Batches(effective_batch))
        baseline = space.baseline("sdpa")
        names = distributions(space, baseline, sampler)
        for candidate in [*every_candidate(space), baseline]:
            assert contains(names, params_of(candidate, names))

    def test_hold_multiples_that_follow_from_the_samples(self) -> None:
        space = Space(
            arms("bf16"), Batches(64), late=frozenset({"length_multiple", "padding_free"}), multiples=(32, 512)
        )
        names = distributions(space, space.baseline("sdpa"), "autotune")
        for lever in space.late:
            arm = with_lever(space.arms[0], lever, space.late, space.multiples)
            assert arm.length_multiple in space.multiples
            assert contains(names, params_of(space.candidate(arm, 64), names))

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_a_lone_gpu_has_one_strategy_beside_none(self, sampler: SamplerName) -> None:
        offloaded = Arm("bf16", strategy="zero2-offload")
        space = Space((*arms("bf16"), offloaded), Batches(64))
        names = distributions(space, space.baseline("sdpa"), sampler)
        for candidate in every_candidate(space):
            params = params_of(candidate, names)
            assert contains(names, params)
            assert candidate_of(params, space) == candidate

    @given(
        st.none() | st.integers(1, LARGEST_FREE_BATCH),
        st.none() | st.integers(1, 2 * LARGEST_FREE_BATCH),
        st.sampled_from(SAMPLERS),
    )
    def test_of_a_free_batch_are_well_formed(
        self, multiple: int | None, samples: int | None, sampler: SamplerName
    ) -> None:
        most = LARGEST_FREE_BATCH if samples is None else min(samples, LARGEST_FREE_BATCH)
        # Such a search is refused.
        assume(multiple is None or multiple <= most)
        space = Space(arms("bf16"), Batches(None, multiple=multiple, samples=samples))
        batch = distributions(space, space.baseline("sdpa"), sampler)["per_device_train_batch_size"]
        assert isinstance(batch, IntDistribution)
        assert 1 <= batch.low <= batch.high <= most
        assert (batch.high - batch.low) % batch.step == 0
        if sampler in ("autotune", "grid"):
            assert all(contains({"b": batch}, {"b": c.per_device_train_batch_size}) for c in every_candidate(space))
        else:
            assert space.batches.valid(batch.low)
            assert space.batches.valid(batch.high)

    def test_do_not_depend_on_what_is_tried_so_that_a_study_can_go_on(self) -> None:
        assert distributions(SPACE, BASELINE, "tpe") == distributions(SPACE, BASELINE, "tpe")
        precision = distributions(SPACE, BASELINE, "tpe")["precision"]
        assert precision == CategoricalDistribution(["bf16", "fp32", "tf32"])


class TestParameters:
    def test_of_every_candidate_lead_back_to_it(self) -> None:
        names = distributions(SPACE, BASELINE, "autotune")
        for candidate in every_candidate(SPACE):
            params = params_of(candidate, names)
            assert "gradient_accumulation_steps" not in params
            assert candidate_of(params, SPACE) == candidate

    @pytest.mark.parametrize(
        "change",
        [
            {"precision": "fp32"},
            {"per_device_train_batch_size": 24},
            {"per_device_train_batch_size": 0},
            {"attn_implementation": "eager"},
            {"optim": "sgd"},
        ],
    )
    def test_of_something_else_are_no_candidate(self, change: dict[str, Any]) -> None:
        names = distributions(SPACE, BASELINE, "tpe")
        params = params_of(SPACE.candidate(Arm("bf16"), 32), names)
        assert candidate_of({**params, **change}, SPACE) is None
