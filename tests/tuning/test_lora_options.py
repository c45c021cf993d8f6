"""Test which adapters, bits and stored dtype the options stand for."""

from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import InvalidRequestError
from autotune.core.options import OPTIONS
from autotune.core.workload import Workload
from autotune.tuning.options import build_workload, in_usual_dtype

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
    ("option", "value"),
    [("lora_rank", 8), ("lora_alpha", 8), ("lora_dropout", 0.1), ("lora_targets", ("query",)), ("dora", True)],
)
def test_they_are_refused_without_adapters(option: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="applies to LoRA adapters, and there are none") as caught:
        workload(**{option: value})
    assert caught.value.hint == "add --peft lora"


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
