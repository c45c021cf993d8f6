"""Test requests: their records, an effective batch in tokens, the adapters, bits and dtype that options stand for."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import check_refusals, refusal
from reported import report_of
from searching import BERT_LARGE, H200, facts, request

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Headroom
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths
from autotune.core.errors import InvalidRequestError
from autotune.core.options import OPTIONS
from autotune.core.outcome import Effort
from autotune.core.schema import encode
from autotune.core.workload import Workload
from autotune.tuning.allowed import check_request
from autotune.tuning.options import build_workload, in_usual_dtype, request_of, with_effective_batch
from autotune.tuning.prepare import prepare
from autotune.tuning.request import MAX_BATCH_EFFORT, SearchRequest, check_study_name, differences

LENGTHS = Lengths(5, 7, 9, 9, 7.0, 0.0, 0.0, (1,))
TEXTS = DataSpec("/data", "json", "0", facts=DataFacts(8, lengths=LENGTHS))
PADDED = replace(BERT_LARGE, padding=0.2)
FULL, SECOND = replace(H200, memory_free_bytes=0), replace(H200, index=1, uuid="other")


def of_texts(change: dict[str, Any], **options: Any) -> SearchRequest:
    """A search on texts that may have another order."""
    workload = replace(BERT_LARGE, data=replace(TEXTS, **change))
    return request(**{"workload": workload, "any_order": True, "search_effort": "default", **options})


class TestChecked:
    def test_what_the_training_can_have_is_taken(self) -> None:
        check_request(request(workload=PADDED, search_effort="default"))
        of_ernie, of_qwen = {"moe_num_experts": 4}, {"text_config": {"num_local_experts": 4}}
        for more in ({"num_experts": 4}, of_ernie, of_qwen, {"ffn_config": of_ernie}):
            sparse = replace(BERT_LARGE, config={**BERT_LARGE.config, **more})
            check_request(request(workload=sparse, experts_implementations=("eager",)))

    def test_another_order_is_tried_where_it_is_allowed(self) -> None:
        check_request(of_texts({}))
        for allowed in (True, False):
            late = prepare(of_texts({}, any_order=allowed), facts()).space.late
            assert ("train_sampling_strategy" in late) is allowed
        assert of_texts({}).document()["any_order"]

    def test_activations_that_may_be_offloaded(self) -> None:
        arms = prepare(request(offload_activations="on", search_effort="default"), facts()).space.arms
        assert {(arm.gradient_checkpointing, arm.offload_activations) for arm in arms} == {(False, False), (True, True)}

    def test_as_many_layers_as_the_model_can_recompute(self) -> None:
        arms = prepare(request(partial_checkpointing="12"), facts(checkpointing_layers=24)).space.arms
        assert {arm.checkpointed_layers for arm in arms} == {None, 12}

    def test_messages_of_requests_that_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        offload, partly = {"offload_activations": "on"}, request(partial_checkpointing="12")
        asked = {
            "no free memory": replace(request(memory_limit_bytes=None), device=FULL),
            "no free memory for the limit": replace(request(memory_limit_bytes=2**30), device=FULL),
            **{
                f"{lever} of padded sequences to classify": request(workload=PADDED, **{lever: "on"})
                for lever in ("fused_loss", "sparse_prediction", "unpadded", "padding_free")
            },
            "FP8 on an A100": replace(request(float8="on"), device=replace(H200, capability=(8, 0))),
            "no experts": request(experts_implementations=("eager",)),
            "another order of one length": of_texts({}, workload=BERT_LARGE),
            "another order, padded to one length": of_texts({"padding": "max_length"}),
            "another order, grouped already": of_texts({"group_by_length": True}),
            "another order in a quick search": of_texts({}, search_effort="quick"),
            "offloaded and not recomputed": request(**offload, gradient_checkpointing="off"),
            "offloaded and compiled": request(**offload, torch_compile="on"),
            "offloaded on a CPU": replace(request(**offload), device=replace(H200, kind="cpu")),
            "offloaded on two GPUs": request(**offload, others=(SECOND,), world_size=2),
            "tokens that two devices cannot share": request(effective_batch=1, effective_tokens=512, world_size=2),
            "tokens that no multiple divides": request(effective_batch=1, effective_tokens=512, batch_multiple=3),
        }
        prepared = {
            "no mask where texts are padded": (request(workload=of_texts({}).workload, unpadded="on"), {}),
            "layers that cannot be told apart": (partly, {}),
            "more layers than there are": (partly, {"checkpointing_layers": 6}),
        }
        monkeypatch.setattr("autotune.space.features.how_to_add", lambda package: f"install {package}")
        cases: dict[str, Callable[[], object]] = {name: partial(check_request, each) for name, each in asked.items()}
        cases |= {name: partial(prepare, each, facts(**model)) for name, (each, model) in prepared.items()}
        with monkeypatch.context() as patch:
            patch.setattr("autotune.space.features.version_of", lambda name: None)
            told = refusal(partial(check_request, request(float8="on")))
        assert told[1:] == ["--lever float8=on needs torchao, which is not installed", "install torchao"]
        check_refusals("requests", cases)


class TestStudyName:
    @pytest.mark.parametrize("name", ["bert", "bert-large-64", "a", "x" * 100, "my study", "v1.2+x=3@home", "_x"])
    def test_that_will_do(self, name: str) -> None:
        check_study_name(name)
        assert replace(request(), study=name).study == name

    def test_messages_of_names_that_would_not_do_as_a_folder_s(self) -> None:
        signs = ("a/b", "../x", "a\\b", "/etc", "a\n", "a\0", "ä", "a:b", "a*", "bad\udcff", "~")
        names = (*signs, "", " ", "-x", ".", "..", "x ", "x.", ".hidden", "x" * 101)
        check_refusals("study-names", {ascii(name): partial(request, study=name) for name in names})


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
        ({"levers": "off", "expandable_segments": "on"}, "expandable_segments:True", "on"),
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
    asked = replace(request(expandable_segments="auto"), device=replace(H200, kind="cpu"))
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
        data = encode(DataSpec("/data/texts.jsonl", "json", "0", facts=DataFacts(8)))
        assert differences({"data": data}, {"data": None}) == ["data: texts.jsonl, now not given"]
        assert differences({"lora_options": None}, {"lora_options": {"r": 8}}) == ["lora_options: not given, now given"]
        assert differences({}, {"a": None}) == []


def effective_batch_of(tokens: int | None, workload: Workload = BERT_LARGE, **options: Any) -> Any:
    given = {"effective_tokens": tokens, "effective_batch": None, **options}
    return with_effective_batch(given, workload)["effective_batch"]


def test_tokens_become_samples() -> None:
    assert effective_batch_of(64 * 512) == 64
    assert effective_batch_of(None, effective_batch=8) == 8


def test_messages_of_tokens_and_adapters_that_are_refused() -> None:
    unread = replace(BERT_LARGE, data=DataSpec("a.jsonl", "json", "0"))
    cases: dict[str, Callable[[], object]] = {
        "1,000 tokens of 512": partial(effective_batch_of, 1000),
        "100 tokens of 512": partial(effective_batch_of, 100),
        "tokens and samples": partial(effective_batch_of, 512, effective_batch=1),
        "tokens of images": partial(effective_batch_of, 512, replace(BERT_LARGE, task="image-classification")),
        "tokens of texts": partial(effective_batch_of, 512, unread),
    }
    of_lora = {"lora_rank": 8, "lora_alpha": 8, "lora_dropout": 0.1, "lora_targets": ("query",), "dora": True}
    check_refusals(
        "tokens_and_adapters",
        cases | {f"{name} without adapters": partial(workload, **{name: value}) for name, value in of_lora.items()},
    )


def test_padding_is_no_token_that_counts() -> None:
    """A tenth of each sample is padding."""
    full, padded = (report_of(Candidate(Arm(), 8), "cuda", (), replace(BERT_LARGE, padding=p)) for p in (0.0, 0.1))
    tokens = [report.tokens_per_second(report.pooled(report.best)) for report in (full, padded)]
    assert tokens[1] == pytest.approx(0.9 * (tokens[0] or 0))


def test_the_command_says_it_in_tokens() -> None:
    asked = request_of(
        {"model": "bert-tiny", "effective_tokens": 128, "seq_len": 128, "world_size": 2, "device": "cpu"}
    )
    with pytest.raises(InvalidRequestError, match="--effective-tokens 128 cannot be shared equally by 2 devices"):
        check_request(asked)


FOLDER = str(Path(__file__).parents[1] / "cli" / "tiny-bert")


def workload(**options: Any) -> Workload:
    defaults = {option.name: option.default for option in OPTIONS}
    return build_workload({**defaults, "model": FOLDER, **options})


def test_lora_arguments_are_what_recipes_use_unless_others_are_given() -> None:
    assert workload(peft="lora").lora_arguments() == {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    given = workload(
        peft="lora",
        lora_rank=8,
        lora_alpha=8,
        lora_dropout=0.05,
        lora_targets=("query", "value"),
        dora=True,
        rslora=True,
    )
    assert given.lora_arguments() == {
        "r": 8,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "target_modules": ["query", "value"],
        "use_dora": True,
        "use_rslora": True,
    }
    told = "(alpha=8, dropout=0.05, target_modules=['query', 'value'], use_dora=True, use_rslora=True)"
    assert given.describe_weights() == f"float32 weights, LoRA of rank 8 {told}"
    assert len({each.fingerprint() for each in (given, workload(peft="lora", lora_rank=8), workload())}) == 3


def test_all_linear_is_the_default_by_pefts_name() -> None:
    assert workload(peft="lora", lora_targets=("all-linear",)) == workload(peft="lora")


@pytest.mark.parametrize(
    ("options", "said", "precisions", "stored"),
    [
        ({}, "bfloat16", ("fp32", "bf16"), "float32"),
        ({"peft": "lora"}, "float32", ("fp32", "bf16"), "bfloat16"),
        ({"peft": "lora"}, "float16", ("fp32", "fp16"), "float16"),
        ({"peft": "lora", "task": "causal-lm"}, "bfloat16", ("fp32", "fp16"), "float16"),
        # Its new head would be trained in float16.
        ({"peft": "lora", "task": "sequence-classification"}, "bfloat16", ("fp32", "fp16"), "bfloat16"),
        ({"peft": "lora", "task": "causal-lm"}, "bfloat16", ("fp32",), "bfloat16"),
        ({"peft": "lora"}, "float8", ("fp32", "fp16"), "float32"),
        ({"peft": "lora", "dtype": "float32"}, "bfloat16", ("fp32", "bf16"), "float32"),
    ],
)
def test_frozen_weights_are_stored_in_bfloat16_where_the_device_has_it(
    options: dict[str, Any], said: str, precisions: Any, stored: str
) -> None:
    made = workload(**options)
    made.config["dtype"] = said
    assert in_usual_dtype(made, options.get("dtype"), precisions).dtype == stored


def test_four_bits_are_those_of_the_recipes() -> None:
    assert workload(peft="lora", quantize="4bit", dtype="bfloat16", task="causal-lm").bits_arguments() == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    # A new head is trained beside the adapters.
    heads = workload(peft="lora", quantize="8bit", task="sequence-classification").bits_arguments()
    assert heads == {"load_in_8bit": True, "llm_int8_skip_modules": ["classifier", "score"]}
