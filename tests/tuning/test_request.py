"""Test requests: errors before any process starts, and which requests are equal."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from searching import BERT_LARGE, H200, facts, request

from autotune.core.ceiling import Headroom
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths
from autotune.core.errors import DeviceError, InvalidRequestError
from autotune.core.outcome import Effort
from autotune.tuning.allowed import check_request
from autotune.tuning.options import request_of
from autotune.tuning.prepare import prepare
from autotune.tuning.request import MAX_BATCH_EFFORT, check_study_name, differences


class TestChecked:
    @pytest.mark.parametrize("limit_bytes", [None, 2**30])
    def test_a_device_without_free_memory(self, limit_bytes: int | None) -> None:
        full = dataclasses.replace(H200, memory_free_bytes=0)
        with pytest.raises(DeviceError, match=r"no free memory of its 140\.0 GiB"):
            check_request(dataclasses.replace(request(memory_limit_bytes=limit_bytes), device=full))

    @pytest.mark.parametrize(
        ("lever", "words"),
        [
            ("fused_loss", "--lever fused_loss=on: sequence-classification has no loss over a vocabulary"),
            ("sparse_prediction", "--lever sparse_prediction=on: sequence-classification masks no tokens"),
            ("unpadded", "--lever unpadded=on: samples are padded"),
            ("padding_free", "--lever padding_free=on: samples of sequence-classification are not put in one row"),
        ],
    )
    def test_a_lever_that_the_training_cannot_have(self, lever: str, words: str) -> None:
        padded = dataclasses.replace(BERT_LARGE, padding=0.2)
        with pytest.raises(InvalidRequestError, match=words):
            check_request(request(workload=padded, **{lever: "on"}))
        check_request(request(workload=padded, search_effort="default"))

    def test_float8_needs_a_gpu_that_has_it_and_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = request(float8="on")
        older = dataclasses.replace(asked, device=dataclasses.replace(H200, capability=(8, 0)))
        with pytest.raises(DeviceError, match="NVIDIA H200 has no FP8 units"):
            check_request(older)
        monkeypatch.setattr("autotune.space.features.version_of", lambda name: None)
        with pytest.raises(InvalidRequestError, match="--lever float8=on needs torchao, which is not installed"):
            check_request(asked)

    def test_experts_of_a_model_that_has_some(self) -> None:
        of_ernie, of_qwen = {"moe_num_experts": 4}, {"text_config": {"num_local_experts": 4}}
        for more in ({"num_experts": 4}, of_ernie, of_qwen, {"ffn_config": of_ernie}):
            sparse = dataclasses.replace(BERT_LARGE, config={**BERT_LARGE.config, **more})
            check_request(request(workload=sparse, experts_implementations=("eager",)))
        with pytest.raises(InvalidRequestError, match="--experts eager: autotune finds no experts in the config of"):
            check_request(request(experts_implementations=("eager",)))

    def test_a_lever_that_the_data_rules_out_once_it_was_read(self) -> None:
        data = DataSpec("/data", "json", "0", facts=DataFacts(8, lengths=Lengths(5, 7, 9, 9, 7.0, 0.0, 0.0, (1,))))
        with pytest.raises(InvalidRequestError, match="--lever unpadded=on: samples are padded"):
            prepare(request(workload=dataclasses.replace(BERT_LARGE, data=data), unpadded="on"), facts())

    def test_activations_that_may_be_offloaded(self) -> None:
        arms = prepare(request(offload_activations="on", search_effort="default"), facts()).space.arms
        assert {(arm.gradient_checkpointing, arm.offload_activations) for arm in arms} == {(False, False), (True, True)}
        with pytest.raises(InvalidRequestError, match="offload_activations=on: nothing is recomputed with --grad"):
            check_request(request(offload_activations="on", gradient_checkpointing="off"))
        with pytest.raises(InvalidRequestError, match="activations=on does not go with --lever torch_compile=on"):
            check_request(request(offload_activations="on", torch_compile="on"))
        cpu, other = dataclasses.replace(H200, kind="cpu"), dataclasses.replace(H200, index=1, uuid="other")
        with pytest.raises(InvalidRequestError, match="on: activations on cpu are in the host's memory already"):
            check_request(dataclasses.replace(request(offload_activations="on"), device=cpu))
        with pytest.raises(InvalidRequestError, match="--lever offload_activations=on: it is searched on one GPU"):
            check_request(request(offload_activations="on", others=(other,), world_size=2))

    def test_more_layers_than_the_model_can_recompute(self) -> None:
        partial = request(partial_checkpointing="12")
        check_request(partial)
        with pytest.raises(InvalidRequestError, match="12: the layers of this model cannot be told apart"):
            prepare(partial, facts())
        assert {arm.checkpointed_layers for arm in prepare(partial, facts(checkpointing_layers=24)).space.arms} == {
            None,
            12,
        }
        with pytest.raises(InvalidRequestError, match="--lever partial_checkpointing=12: the model has 6 layers"):
            prepare(partial, facts(checkpointing_layers=6))


class TestStudyName:
    @pytest.mark.parametrize("name", ["bert", "bert-large-64", "a", "x" * 100, "my study", "v1.2+x=3@home", "_x"])
    def test_that_will_do(self, name: str) -> None:
        check_study_name(name)
        assert request().named(name).study == name

    @pytest.mark.parametrize(
        "name",
        [
            "",
            " ",
            "-x",
            ".",
            "..",
            "a/b",
            "../x",
            "a\\b",
            "x" * 101,
            "a\n",
            "a\0",
            "x ",
            "x.",
            "ä",
            "a:b",
            "a*",
            "/etc",
            ".hidden",
            "bad\udcff",
            "~",
        ],
    )
    def test_that_would_not_do_as_a_folder_s(self, name: str) -> None:
        with pytest.raises(InvalidRequestError, match="is not a study name"):
            request(study=name)


class TestBudgetAndEffort:
    @pytest.mark.parametrize(
        ("sampler", "trials", "expected"),
        [("autotune", None, None), ("grid", None, None), ("tpe", None, 32), ("random", None, 32), ("tpe", 7, 7)],
    )
    def test_samplers_that_do_not_know_their_end_have_a_budget(
        self, sampler: Any, trials: int | None, expected: int | None
    ) -> None:
        assert request(sampler=sampler, trials=trials).most_trials == expected

    def test_the_largest_batch_needs_one_measured_step(self) -> None:
        assert request(objective="max-batch").effort == MAX_BATCH_EFFORT
        assert request().effort == Effort()


@pytest.mark.parametrize(
    ("options", "environment", "chosen"),
    [
        ({}, "", "auto"),
        ({"expandable_segments": "off"}, "", "off"),
        ({"effort": "quick"}, "", "off"),
        ({"objective": "max-batch"}, "", "off"),
        ({}, "expandable_segments:True", "on"),
        ({}, "expandable_segments:False", "off"),
    ],
)
def test_expandable_segments_are_a_lever_by_default(
    options: dict[str, Any], environment: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", environment)
    asked = request_of({"model": "bert-base-uncased", "effective_batch": 8, **options}, [H200])
    assert asked.expandable_segments == chosen
    assert len({arm.expandable_segments for arm in prepare(asked, facts()).space.arms}) == 1


def test_a_cpu_has_no_expandable_segments_to_try() -> None:
    asked = dataclasses.replace(request(expandable_segments="auto"), device=dataclasses.replace(H200, kind="cpu"))
    assert not any(arm.expandable_segments for arm in prepare(asked, facts()).space.arms)


def value_in_difference(value: object) -> str:
    """As differences name a value."""
    return "not given" if value is None else ", ".join(value) if isinstance(value, list) else repr(value)


class TestDifferences:
    def test_a_recorded_request_is_the_same_as_it_was(self) -> None:
        asked = request(
            precisions=("bf16", "tf32"), attn_implementations=("eager",), headroom=Headroom(size_bytes=2**30)
        )
        recorded = json.loads(json.dumps(asked.document()))
        assert differences(recorded, asked.document()) == []

    def test_how_much_may_be_spent_is_no_difference(self) -> None:
        more = request(trials=50, time_budget_seconds=900.0, trial_timeout_seconds=10.0, search_effort="default")
        assert differences(request().document(), more.document()) == []

    @given(st.sampled_from(sorted(request().document())))
    def test_everything_else_is(self, key: str) -> None:
        recorded = request().document()
        changed = {**recorded, key: "something else"}
        is_budget = key in ("trials", "time_budget_seconds", "trial_timeout_seconds", "fresh", "schema_version")
        assert differences(recorded, changed) == (
            [] if is_budget else [f"{key}: {value_in_difference(recorded[key])}, now 'something else'"]
        )

    def test_nested_ones_bear_both_names(self) -> None:
        before = {"config": {"layers": 2, "heads": 4}, "name": "x"}
        now = {"config": {"layers": 3, "heads": 4, "dropout": 0.1}, "name": "x"}
        assert differences(before, now) == ["config.dropout: not given, now 0.1", "config.layers: 2, now 3"]

    def test_what_one_side_lacks_is_one(self) -> None:
        assert differences({"a": 1}, {}) == ["a: 1, now not given"]
        data = DataSpec("/data/texts.jsonl", "json", "0", facts=DataFacts(8)).document()
        assert differences({"data": data}, {"data": None}) == ["data: texts.jsonl, now not given"]
        assert differences({"lora_options": None}, {"lora_options": {"r": 8}}) == ["lora_options: not given, now given"]
        assert differences({}, {"a": None}) == []
