"""Test the search space: exact effective batches, multiples, and precisions for each weight dtype.

The table of levers has every setting of an arm, and what is computed from its rows; a candidate becomes fields of the
installed ``TrainingArguments``.
"""

import dataclasses
import itertools
import re
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import check_messages, check_refusals
from searching import BERT_LARGE, arms
from transformers import TrainingArguments

from autotune.core.candidate import PRECISIONS, Arm, Candidate, Precision
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths
from autotune.core.errors import InvalidRequestError
from autotune.core.workload import DTypeName, Workload
from autotune.space.arms import (
    as_asked,
    changed,
    excluding,
    inconvenience,
    memory_class,
    needs_at_least,
    never_slower,
    prediction_class,
    why_unpredictable,
    with_lever,
    without,
)
from autotune.space.levers import LEVERS, Lever, Training, why_not
from autotune.space.space import LARGEST_FREE_BATCH, Batches, Space, choose_arms, choose_precisions
from autotune.space.training_arguments import checkpointing_field, training_arguments

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

    def test_messages_of_refused_batches(self) -> None:
        sizes = ((2, 4, 1), (0, 1, 1), (-8, 1, 1), (64, 0, 1), (64, 1, 0), (None, 1, 65537))
        check_refusals("batches", {" ".join(map(str, each)): partial(Batches, *each) for each in sizes})

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

    def test_messages_of_refused_precisions(self) -> None:
        asked: tuple[tuple[Precision, tuple[Precision, ...], DTypeName], ...] = (
            ("bf16", ("fp32", "fp16"), "float32"), ("fp16", ALL, "bfloat16"), ("tf32", ALL, "float16"),
        )  # fmt: skip
        check_refusals("precisions", {
            f"{precision} of {dtype} where there is {', '.join(has)}": partial(
                choose_precisions, (precision,), has, "cuda:0 (Tesla)", dataclasses.replace(BERT_LARGE, dtype=dtype)
            )
            for precision, has, dtype in asked
        })  # fmt: skip


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


FIELDS = {field.name: field for field in dataclasses.fields(Arm)}
PLAIN = Arm("bf16")


class TestTable:
    def test_has_a_row_for_every_setting_in_its_order(self) -> None:
        assert [row.name for row in LEVERS] == list(FIELDS)

    @pytest.mark.parametrize("row", LEVERS, ids=lambda row: row.name)
    def test_is_about_what_there_is(self, row: Lever) -> None:
        assert row.part_of is None or row.part_of in FIELDS
        assert row.argument is None or row.argument in {f.name for f in dataclasses.fields(TrainingArguments)}

    def test_no_two_settings_have_the_same_place_in_a_preference(self) -> None:
        places = [row.preference for row in LEVERS if row.preference is not None]
        assert len(places) == len(set(places))

    @pytest.mark.parametrize("row", [row for row in LEVERS if row.values], ids=lambda row: row.name)
    def test_a_value_that_is_not_the_default_is_described(self, row: Lever) -> None:
        others = [value for value in row.values if value != FIELDS[row.name].default]
        whole = {row.part_of: True} if row.part_of == "torch_compile" else {}
        assert all(Arm(**whole, **{row.name: value}).describe() != Arm(**whole).describe() for value in others)

    def test_rows_are_filled_to_another_multiple_than_lengths_are_padded_to(self) -> None:
        few = with_lever(Arm("bf16"), "length_multiple", {"length_multiple"}, (128, 2048))
        rows = with_lever(few, "padding_free", {"length_multiple"}, (128, 2048))
        assert (few.length_multiple, rows.length_multiple, rows.padding_free) == (128, 2048, True)
        captured = with_lever(changed(rows, cuda_graphs=True), "regional_compilation", ())
        assert captured.torch_compile
        assert excluding(captured) is None
        assert "length_multiple" in str(excluding(changed(captured, length_multiple=None)))

    def test_what_does_not_go_together_is_said(self) -> None:
        offloaded = Arm("bf16", True, offload_activations=True, cuda_graphs=True)
        assert excluding(offloaded) == "cuda_graphs does not go with offload_activations"
        assert excluding(Arm("bf16", cuda_graphs=True, unpadded=True)) is None
        by_layer = Arm("bf16", torch_compile=True, regional_compilation=True, cuda_graphs=True)
        assert excluding(by_layer) is None
        assert excluding(dataclasses.replace(by_layer, torch_compile_mode="reduce-overhead")) is not None
        assert excluding(Arm(torch_compile=True, strategy="zero2", ranks=2)) is not None
        divided = Arm(fused_loss=True, strategy="zero3", ranks=2)
        assert excluding(divided) == "fused_loss needs whole weights, which ZeRO-3 has divided"
        some = Arm("bf16", True, checkpointed_layers=2, strategy="fsdp", ranks=2)
        assert excluding(some) == "FSDP2 checkpoints every layer that it shards, or none"
        assert excluding(dataclasses.replace(some, strategy="ddp")) is None


class TestWhatFollows:
    def test_what_a_setting_is_part_of_takes_it_along(self) -> None:
        loading = Arm(dataloader_num_workers=4, dataloader_prefetch_factor=4)
        assert changed(loading, dataloader_num_workers=0) == Arm()
        assert without(Arm(strategy="fsdp", ranks=2, sync_each_batch=True), ["strategy"]) == Arm()

    def test_arms_of_one_memory_class_differ_in_what_takes_no_memory(self) -> None:
        twins = [Arm(p, cpu_affinity=pinned) for p, pinned in itertools.product(("bf16", "fp16"), (False, True))]
        assert {memory_class(arm) for arm in twins} == {Arm("fp16")}
        assert memory_class(Arm(expandable_segments=True)) != memory_class(Arm())
        assert prediction_class(Arm(expandable_segments=True)) == prediction_class(Arm())

    def test_what_saves_memory_never_needs_more(self) -> None:
        saving = [Arm(**values) for values in ({"gradient_checkpointing": True}, {"expandable_segments": True})]
        assert all(needs_at_least(Arm(), arm) and not needs_at_least(arm, Arm()) for arm in saving)
        assert not needs_at_least(*saving)
        assert not needs_at_least(*reversed(saving))
        assert needs_at_least(Arm(), Arm(gradient_checkpointing=True, expandable_segments=True))

    def test_a_question_leaves_out_what_takes_no_memory(self) -> None:
        assert as_asked(Arm("tf32", cpu_affinity=True, ddp_broadcast_buffers=False)) == Arm("tf32")
        ddp = Arm("bf16", strategy="ddp", ranks=2, ddp_find_unused_parameters=False, ddp_broadcast_buffers=False)
        assert as_asked(ddp) == Arm("bf16", strategy="ddp", ranks=2)

    def test_an_arm_that_is_slower_in_two_ways_is_never_faster(self) -> None:
        faster = never_slower(Arm("fp16", True, expandable_segments=True))
        assert {PLAIN, Arm("bf16", True)} <= faster
        assert Arm("tf32") not in faster
        assert never_slower(PLAIN) == frozenset()

    def test_compiled_layers_are_never_slower_in_cuda_graphs(self) -> None:
        compiled = Arm("bf16", torch_compile=True, regional_compilation=True)
        in_graphs = Arm("bf16", torch_compile=True, regional_compilation=True, cuda_graphs=True)
        assert never_slower(compiled) == {in_graphs}
        assert never_slower(in_graphs) == frozenset()

    def test_of_equals_the_one_with_less_to_set_is_preferred(self) -> None:
        sort_offers = [
            PLAIN, Arm("bf16", cpu_affinity=True), Arm("bf16", dataloader_num_workers=2),
            Arm("bf16", expandable_segments=True), Arm("bf16", True), Arm("bf16", torch_compile=True),
            Arm("bf16", strategy="fsdp", ranks=2), Arm("fp16"), Arm("tf32"),
        ]  # fmt: skip
        assert sorted({*sort_offers}, key=inconvenience) == sort_offers

    def test_sparse_settings_are_recorded_where_they_are_not_the_default(self) -> None:
        sparse = {name for name, field in FIELDS.items() if field.metadata.get("sparse")}
        assert not sparse & set(Candidate(Arm(), 8).recorded_parameters())
        every = Candidate(Arm("bf16", True, torch_compile=True), 8, 2)
        assert Candidate.from_parameters(every.recorded_parameters()) == every


class TestObstacles:
    TEXT = dataclasses.replace(BERT_LARGE, task="causal-lm")

    def told(self, lever: str, workload: Workload = TEXT, device: str = "cuda", ranks: int = 1) -> str | None:
        (row,) = (row for row in LEVERS if row.name == lever)
        return why_not(row, Training.of(workload, device, ranks, 24))

    def test_messages_of_obstacles(self) -> None:
        padded, masked = (dataclasses.replace(self.TEXT, **each) for each in ({"padding": 0.2}, {"task": "masked-lm"}))
        of_images = dataclasses.replace(self.TEXT, task="image-text-to-text")
        differ, alike, full = with_lengths(5, 9), with_lengths(9, 9), with_lengths(5, 9, padding="max_length")
        packed = dataclasses.replace(alike, data=dataclasses.replace(alike.data, packing=True))
        unread = dataclasses.replace(alike, data=DataSpec("/data", "json", "0"))
        cases: dict[str, dict[str, tuple[Any, ...]]] = {
            "cuda_graphs": {
                "a GPU": (), "a CPU": (self.TEXT, "cpu"), "two GPUs": (self.TEXT, "cuda", 2),
                "lengths that differ": (differ,), "lengths padded to one": (full,),
            },
            "checkpointed_layers": {"a language model": ()},
            "length_multiple": {"one length": (), "lengths that differ": (differ,)},
            "unpadded": {
                "full length": (), "padding": (padded,), "lengths padded to one": (full,), "one length": (alike,),
                "packed samples": (packed,),
            },
            "padding_free": {
                "full length": (), "one length": (alike,), "lengths that differ": (differ,),
                "packed samples": (packed,), "data that was not read": (unread,),
            },
            "fused_loss": {"a language model": (), "classes": (BERT_LARGE,), "images and text": (of_images,)},
            "sparse_prediction": {"a causal model": (), "a masked one": (masked,)},
        }  # fmt: skip
        told = {
            lever: [f"{name}: {self.told(lever, *given) or 'none'}" for name, given in each.items()]
            for lever, each in cases.items()
        }
        check_messages("obstacles", told)


def with_lengths(shortest: int, longest: int, padding: str = "longest") -> Workload:
    lengths = Lengths(shortest, longest, longest, longest, float(longest), 0.0, 0.0, (1,))
    data = DataSpec("/data", "json", "0", padding=padding, facts=DataFacts(8, lengths=lengths))
    return dataclasses.replace(BERT_LARGE, task="causal-lm", data=data)


def test_losses_are_predicted_where_a_step_is_traced_with_them() -> None:
    masked = dataclasses.replace(BERT_LARGE, task="masked-lm")
    zero, fsdp = Arm(strategy="zero2-offload"), Arm(strategy="fsdp", ranks=2)
    for arm in (zero, fsdp, dataclasses.replace(zero, ranks=2)):
        assert why_unpredictable(arm, masked) is None
        assert why_unpredictable(changed(arm, sparse_prediction=True), masked) is not None
    # FSDP2 keeps the weights of the output layer whole meanwhile.
    assert why_unpredictable(changed(fsdp, fused_loss=True), BERT_LARGE) is None
    assert why_unpredictable(changed(zero, fused_loss=True), BERT_LARGE) is not None


OLD = {"gradient_checkpointing", "gradient_checkpointing_kwargs", "bf16", "fp16", "tf32", "optim", "use_cpu"}
NEW = OLD | {"activation_checkpointing", "activation_checkpointing_kwargs"}


@pytest.mark.parametrize(("fields", "name"), [(OLD, "gradient_checkpointing"), (NEW, "activation_checkpointing")])
def test_checkpointing_bears_the_name_of_its_time(fields: set[str], name: str) -> None:
    assert checkpointing_field(fields) == name
    on = training_arguments(Candidate(Arm(gradient_checkpointing=True), 8), fields, "cuda")
    assert on[name] is True
    assert on[f"{name}_kwargs"] == {"use_reentrant": False}
    offloaded = Arm(gradient_checkpointing=True, offload_activations=True)
    kwargs = training_arguments(Candidate(offloaded, 8), fields, "cuda")[f"{name}_kwargs"]
    assert kwargs == {"use_reentrant": False, "offload": True}
    off = training_arguments(Candidate(Arm(), 8), fields, "cuda")
    assert off[name] is False
    assert [key for key in off if "checkpointing" in key] == [name]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_said_and_so_is_what_it_is_not(precision: Precision) -> None:
    arguments = training_arguments(Candidate(Arm(precision), 8), NEW, "cuda")
    said = {name: arguments[name] for name in ("bf16", "fp16")}
    assert said == {name: name == precision for name in said}
    # Else the default of TrainingArguments: what stays in float32 beside an autocast keeps its precision.
    assert arguments["tf32"] is (True if precision == "tf32" else None)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("device_kind", "revision"), [("cuda", 1), ("cuda", 2), ("cpu", 3)])
def test_what_was_measured_without_tf32_is_exported_so(precision: Precision, device_kind: str, revision: int) -> None:
    arguments = training_arguments(Candidate(Arm(precision), 8), NEW, device_kind, revision)
    assert arguments["tf32"] is (precision == "tf32")


def test_a_compiled_fp32_stays_without_tf32() -> None:
    """TrainingArguments turns it on for compiled models where nothing is said."""
    assert training_arguments(Candidate(Arm("fp32", torch_compile=True), 8), NEW, "cuda")["tf32"] is False
    assert training_arguments(Candidate(Arm("bf16", torch_compile=True), 8), NEW, "cuda")["tf32"] is None


def test_levers_are_said_also_where_they_are_off() -> None:
    arguments = training_arguments(Candidate(Arm(torch_compile=True), 8), NEW, "cuda")
    assert arguments["torch_compile"] is True
    assert arguments["use_liger_kernel"] is False


def test_only_a_cpu_is_asked_for() -> None:
    assert training_arguments(Candidate(Arm(), 8), NEW, "cpu")["use_cpu"] is True
    assert "use_cpu" not in training_arguments(Candidate(Arm(), 8), NEW, "cuda")
