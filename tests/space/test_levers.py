"""Test the table of levers: it has every setting of an arm, and what is computed from its rows."""

import dataclasses
import itertools

import pytest
from searching import BERT_LARGE
from transformers import TrainingArguments

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths
from autotune.core.workload import Workload
from autotune.space.levers import (
    LEVERS,
    Lever,
    Training,
    as_asked,
    changed,
    excluding,
    inconvenience,
    memory_class,
    needs_at_least,
    never_slower,
    prediction_class,
    why_not,
    why_unpredictable,
    with_lever,
    without,
)

FIELDS = {field.name: field for field in dataclasses.fields(Arm)}
PLAIN = Arm("bf16")


def anything(arm: Arm) -> bool:
    return True


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
        assert excluding(Arm("bf16", True, cuda_graphs=True)) == "cuda_graphs does not go with gradient_checkpointing"
        assert excluding(Arm("bf16", cuda_graphs=True, unpadded=True)) is None
        by_layer = Arm("bf16", torch_compile=True, regional_compilation=True, cuda_graphs=True)
        assert excluding(by_layer) is None
        assert excluding(dataclasses.replace(by_layer, torch_compile_mode="reduce-overhead")) is not None
        assert excluding(Arm(torch_compile=True, strategy="zero2", ranks=2)) is not None
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
        faster = never_slower(Arm("fp16", True, expandable_segments=True), allows=anything)
        assert {PLAIN, Arm("bf16", True)} <= faster
        assert Arm("tf32") not in faster
        assert never_slower(PLAIN, allows=anything) == frozenset()
        assert never_slower(Arm("fp32"), allows=lambda arm: False) == frozenset()

    def test_of_equals_the_one_with_less_to_set_is_preferred(self) -> None:
        in_order = [
            PLAIN, Arm("bf16", cpu_affinity=True), Arm("bf16", dataloader_num_workers=2),
            Arm("bf16", expandable_segments=True), Arm("bf16", True), Arm("bf16", torch_compile=True),
            Arm("bf16", strategy="fsdp", ranks=2), Arm("fp16"), Arm("tf32"),
        ]  # fmt: skip
        assert sorted({*in_order}, key=inconvenience) == in_order

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

    @pytest.mark.parametrize("lever", ["cuda_graphs", "checkpointed_layers", "unpadded", "fused_loss"])
    def test_there_is_none_for_a_language_model_on_a_gpu(self, lever: str) -> None:
        assert self.told(lever) is None

    def test_graphs_have_one_shape_on_one_gpu(self) -> None:
        assert self.told("cuda_graphs", device="cpu") == "cpu has no CUDA graphs"
        assert self.told("cuda_graphs", ranks=2) == "several ranks are not captured"
        assert "batches differ in length" in str(self.told("cuda_graphs", with_lengths(5, 9)))
        assert self.told("length_multiple", with_lengths(5, 9)) is None
        assert self.told("length_multiple") == "batches have one length"
        assert self.told("cuda_graphs", with_lengths(5, 9, padding="max_length")) is None

    def test_a_mask_is_needed_where_a_sample_is_padded(self) -> None:
        assert self.told("unpadded", dataclasses.replace(self.TEXT, padding=0.2)) is not None
        assert self.told("unpadded", with_lengths(5, 9, padding="max_length")) is not None
        assert self.told("unpadded", with_lengths(9, 9)) is None

    def test_samples_are_joined_where_one_may_be_padded(self) -> None:
        assert self.told("padding_free") == "no sample is padded"
        assert self.told("padding_free", with_lengths(9, 9)) == "no sample is padded"
        assert self.told("padding_free", with_lengths(5, 9)) is None
        packed = with_lengths(9, 9)
        assert packed.data is not None
        packed = dataclasses.replace(packed, data=dataclasses.replace(packed.data, packing=True))
        assert self.told("padding_free", packed) is None
        assert "packed" in str(self.told("unpadded", packed))
        unread = dataclasses.replace(packed, data=DataSpec("/data", "json", "0"))
        assert self.told("padding_free", unread) is None

    def test_only_a_loss_over_a_vocabulary_is_fused(self) -> None:
        assert self.told("fused_loss", BERT_LARGE) is not None
        of_images = dataclasses.replace(self.TEXT, task="image-text-to-text")
        assert self.told("fused_loss", of_images) == "it is not supported for models of images and text"

    def test_only_masked_language_models_predict_some_tokens_alone(self) -> None:
        assert self.told("sparse_prediction") == "causal-lm masks no tokens"
        assert self.told("sparse_prediction", dataclasses.replace(self.TEXT, task="masked-lm")) is None


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
