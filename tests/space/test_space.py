"""Test the search space: exact effective batches, multiples, and precisions for each weight dtype."""

import dataclasses
import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from searching import BERT_LARGE, arms

from autotune.core.candidate import Arm, Candidate, Precision
from autotune.core.errors import AutotuneError, DeviceError, InvalidRequestError
from autotune.core.workload import DTypeName
from autotune.space.space import LARGEST_FREE_BATCH, Batches, Space, choose_arms, choose_precisions

SHARES = st.integers(1, 4096)
WORLDS = st.integers(1, 16)
ALL: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16")


def divisors(number: int) -> set[int]:
    return {d for d in range(1, number + 1) if number % d == 0}


class TestEffectiveBatch:
    @given(SHARES, WORLDS)
    def test_every_candidate_is_exactly_the_effective_batch(self, share: int, world_size: int) -> None:
        batches = Batches(share * world_size, world_size)
        space = Space((Arm(),), batches)
        for level in batches.levels():
            for batch in batches.at_level(level):
                candidate = space.candidate(Arm(), batch)
                assert candidate.samples_per_step * world_size == share * world_size
                assert space.contains(candidate)

    @given(SHARES, WORLDS)
    def test_the_levels_share_out_the_divisors(self, share: int, world_size: int) -> None:
        batches = Batches(share * world_size, world_size)
        on_levels = [batch for level in batches.levels() for batch in batches.at_level(level)]
        assert len(on_levels) == len(set(on_levels))
        assert set(on_levels) == divisors(share)
        assert all(batches.level(b) == level for level in batches.levels() for b in batches.at_level(level))

    @pytest.mark.parametrize(
        ("effective", "first"),
        [(136, (8, 34, 68, 136)), (40, (8, 20, 40)), (96, (8, 16, 24, 32, 48, 96)), (32, (8, 16, 32)), (12, ())],
    )
    def test_even_batches_are_tried_between_multiples_of_8_that_are_far_apart(
        self, effective: int, first: tuple[int, ...]
    ) -> None:
        assert Batches(effective).at_level(8) == first

    @given(SHARES, st.integers(1, 64))
    def test_a_strict_multiple_holds_or_names_those_that_would(self, share: int, multiple: int) -> None:
        if share % multiple == 0:
            batches = Batches(share, multiple=multiple)
            assert batches.levels() == (multiple,)
            assert set(batches.at_level(multiple)) == {d for d in divisors(share) if d % multiple == 0}
            assert batches.at_level(multiple)
            return
        with pytest.raises(InvalidRequestError, match=f"--batch-multiple {multiple} .* {share}") as caught:
            Batches(share, multiple=multiple)
        offered = [int(number) for number in re.findall(r"\d+", caught.value.hint)]
        assert set(offered) == divisors(share)
        for other in offered:
            assert Batches(share, multiple=other).at_level(other)

    @given(SHARES, WORLDS)
    def test_an_unequal_share_names_the_nearest_that_work(self, share: int, world_size: int) -> None:
        uneven = share * world_size + 1
        if world_size == 1:
            return
        with pytest.raises(InvalidRequestError, match=f"--effective-batch {uneven}") as caught:
            Batches(uneven, world_size)
        offered = [int(number) for number in re.findall(r"\d+", caught.value.hint)]
        assert len(offered) == 2
        for other in offered:
            assert Batches(other, world_size).baseline()

    def test_fewer_samples_than_devices_offers_no_zero(self) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            Batches(2, 4)
        assert caught.value.hint == "use --effective-batch 4"

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"effective_batch": 0}, "--effective-batch 0"),
            ({"effective_batch": -8}, "--effective-batch -8"),
            ({"effective_batch": 64, "world_size": 0}, "--world-size 0"),
            ({"effective_batch": 64, "multiple": 0}, "--batch-multiple 0"),
            ({"effective_batch": None, "multiple": 65537}, "--batch-multiple 65537"),
        ],
    )
    def test_nonsense_is_named(self, options: dict[str, Any], named: str) -> None:
        with pytest.raises(InvalidRequestError, match=re.escape(named)) as caught:
            Batches(**options)
        assert caught.value.hint

    @given(SHARES)
    def test_the_baseline_is_the_default_batch_of_8_or_the_largest_below_it(self, share: int) -> None:
        batch, accumulation = Batches(share).baseline()
        assert batch * accumulation == share
        assert batch == max(d for d in divisors(share) if d <= 8)

    def test_the_baseline_is_of_one_device_s_share(self) -> None:
        assert Batches(64, 4).baseline() == (8, 2)


class TestFreeBatch:
    def test_accumulation_is_1(self) -> None:
        batches = Batches(None)
        assert batches.at_level(8) == tuple(8 * 2**i for i in range(14))
        assert [batches.at_level(level) for level in (4, 2, 1)] == [(4,), (2,), (1,)]
        assert batches.baseline() == (8, 1)
        assert {batches.accumulation(batch) for batch in (1, 8, 4096)} == {1}

    @given(st.integers(1, LARGEST_FREE_BATCH))
    def test_a_strict_multiple_starts_the_ladder(self, multiple: int) -> None:
        ladder = Batches(None, multiple=multiple).at_level(multiple)
        assert ladder[0] == multiple
        assert all(one * 2 == other for one, other in itertools.pairwise(ladder))
        assert ladder[-1] <= LARGEST_FREE_BATCH < ladder[-1] * 2

    def test_any_multiple_within_bounds_is_in_the_space(self) -> None:
        space = Space((Arm(),), Batches(None, multiple=8))
        assert space.contains(Candidate(Arm(), 136, 1))
        assert space.contains(Candidate(Arm(), LARGEST_FREE_BATCH, 1))
        for batch in (0, -8, 12, LARGEST_FREE_BATCH + 8):
            assert not space.contains(Candidate(Arm(), batch, 1))
        assert not space.contains(Candidate(Arm(), 136, 2))

    @pytest.mark.parametrize(
        ("samples", "ladders", "baseline"),
        [
            (1, [(1,)], 1),
            (5, [(4,), (2,), (1,)], 5),
            (7, [(4,), (2,), (1,)], 7),
            (8, [(8,), (4,), (2,), (1,)], 8),
            (100, [(8, 16, 32, 64), (4,), (2,), (1,)], 8),
        ],
    )
    def test_no_batch_is_larger_than_the_data(
        self, samples: int, ladders: list[tuple[int, ...]], baseline: int
    ) -> None:
        batches = Batches(None, samples=samples)
        assert [batches.at_level(level) for level in batches.levels()] == ladders
        assert batches.baseline() == (baseline, 1)
        assert batches.valid(samples)
        assert not batches.valid(samples + 1)
        # Code of the user's own may go on with the next epoch within a step.
        shared = Batches(96, samples=samples)
        tried = {batch for level in shared.levels() for batch in shared.at_level(level)}
        assert tried == {batch for batch in range(1, samples + 1) if 96 % batch == 0}
        assert all(map(shared.valid, tried))
        assert not any(map(shared.valid, range(samples + 1, 97)))
        assert shared.baseline()[0] == max(batch for batch in tried if batch <= 8)

    def test_data_without_end_is_no_larger_than_the_largest_batch(self) -> None:
        assert Batches(None, samples=10**9).at_level(8) == Batches(None).at_level(8)


class TestContains:
    SPACE = Space(arms("bf16", "tf32"), Batches(64))

    @pytest.mark.parametrize(
        ("arm", "batch", "accumulation", "expected"),
        [
            (Arm("bf16"), 32, 2, True),
            (Arm("tf32", gradient_checkpointing=True), 64, 1, True),
            (Arm("bf16"), 4, 16, True),
            (Arm("bf16"), 32, 1, False),
            (Arm("bf16"), 24, 2, False),
            (Arm("bf16"), 128, 1, False),
            (Arm("fp32"), 32, 2, False),
            (Arm("bf16", attn_implementation="eager"), 32, 2, False),
            (Arm("bf16", optim="adafactor"), 32, 2, False),
        ],
    )
    def test_of_a_candidate(self, arm: Arm, batch: int, accumulation: int, expected: bool) -> None:
        assert self.SPACE.contains(Candidate(arm, batch, accumulation)) is expected


class TestPrecisions:
    @pytest.mark.parametrize(
        ("dtype", "device_has", "expected"),
        [
            ("float32", ALL, ("bf16", "fp16", "tf32", "fp32")),
            ("float32", ("fp32", "fp16"), ("fp16", "fp32")),
            ("bfloat16", ALL, ("bf16", "fp32")),
            ("bfloat16", ("fp32",), ("fp32",)),
            ("float16", ALL, ("fp32",)),
        ],
    )
    def test_all_that_device_and_weights_allow(
        self, dtype: DTypeName, device_has: tuple[Precision, ...], expected: tuple[Precision, ...]
    ) -> None:
        workload = dataclasses.replace(BERT_LARGE, dtype=dtype)
        assert choose_precisions(None, device_has, "cuda:0", workload) == expected

    def test_gradients_of_adapters_are_in_float32_and_those_of_new_heads_are_not(self) -> None:
        adapted = dataclasses.replace(BERT_LARGE, dtype="float16", peft="lora", task="causal-lm")
        assert choose_precisions(None, ALL, "cuda:0", adapted) == ("fp16", "fp32")
        headed = dataclasses.replace(adapted, task="sequence-classification")
        assert choose_precisions(None, ALL, "cuda:0", headed) == ("fp32",)

    def test_what_was_asked_comes_best_first_and_once(self) -> None:
        assert choose_precisions(("tf32", "bf16", "tf32"), ALL, "cuda:0", BERT_LARGE) == ("bf16", "tf32")

    @pytest.mark.parametrize(
        ("asked", "device_has", "dtype", "error", "words"),
        [
            ("bf16", ("fp32", "fp16"), "float32", DeviceError, ("cuda:0 (Tesla)", "bf16", "fp32, fp16")),
            ("fp16", ALL, "bfloat16", InvalidRequestError, ("fp16", "bfloat16", "fp32 or bf16", "--dtype float32")),
            ("tf32", ALL, "float16", InvalidRequestError, ("tf32", "float16", "use fp32")),
        ],
    )
    def test_what_cannot_be_is_named(
        self,
        asked: Precision,
        device_has: tuple[Precision, ...],
        dtype: DTypeName,
        error: type[AutotuneError],
        words: tuple[str, ...],
    ) -> None:
        workload = dataclasses.replace(BERT_LARGE, dtype=dtype)
        with pytest.raises(error) as caught:
            choose_precisions((asked,), device_has, "cuda:0 (Tesla)", workload)
        for word in words:
            assert word in str(caught.value)


class TestArms:
    def test_those_without_checkpointing_come_first_then_by_precision(self) -> None:
        assert [(arm.gradient_checkpointing, arm.precision) for arm in arms("bf16", "tf32")] == [
            (False, "bf16"),
            (False, "tf32"),
            (True, "bf16"),
            (True, "tf32"),
        ]

    def test_every_combination_once(self) -> None:
        found = choose_arms(("bf16",), "auto", ("sdpa", "eager"), ("adafactor", "sgd"), model_checkpoints=True)
        assert len(found) == len(set(found)) == 8

    def test_every_arm_has_the_settings_that_are_on_unless_they_exclude_it(self) -> None:
        settings = {"cuda_graphs": True, "offload_activations": True}
        (found,) = choose_arms(("bf16",), "auto", ("sdpa",), ("sgd",), model_checkpoints=True, settings=settings)
        assert found == Arm("bf16", optim="sgd", cuda_graphs=True)
        settings = {"checkpointed_layers": 12}
        found = choose_arms(("bf16",), "auto", ("sdpa",), ("sgd",), model_checkpoints=True, settings=settings)
        assert [arm.checkpointed_layers for arm in found] == [None, 12]

    @pytest.mark.parametrize(
        ("choice", "model_checkpoints", "expected"),
        [("on", True, {True}), ("off", True, {False}), ("auto", False, {False}), ("off", False, {False})],
    )
    def test_checkpointing_as_asked_where_the_model_can(
        self, choice: Any, model_checkpoints: bool, expected: set[bool]
    ) -> None:
        found = choose_arms(("bf16",), choice, ("sdpa",), ("sgd",), model_checkpoints=model_checkpoints)
        assert {arm.gradient_checkpointing for arm in found} == expected
