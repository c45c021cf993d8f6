"""Test what becomes of a quantization that a model's config states."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BitsAndBytesConfig

from autotune.core.errors import InvalidRequestError
from autotune.core.options import OPTIONS
from autotune.core.workload import Workload
from autotune.models.resolve import resolve_model
from autotune.tuning.options import build_workload

QLORA = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head"]
).to_dict()
NAMED_OF_EVERY_MODEL = ["lm_head", "model.embed_tokens", "multi_modal_projector", "merger", "model.visual", "router"]
COPY = "give a folder with a copy of its config.json without quantization_config"


def workload(folder: Path, stated: Any, **options: Any) -> Workload:
    config = {**resolve_model("llama-tiny").config, "quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    return build_workload({**{option.name: option.default for option in OPTIONS}, "model": str(folder), **options})


@pytest.mark.parametrize(
    ("stated", "quantize"),
    [
        (QLORA, "4bit"),
        ({**QLORA, "llm_int8_skip_modules": NAMED_OF_EVERY_MODEL}, "4bit"),
        (BitsAndBytesConfig(load_in_8bit=True).to_dict(), "8bit"),
        (None, "4bit"),
        (None, None),
    ],
)
def test_what_quantize_does_is_what_it_says(tmp_path: Path, stated: Any, quantize: str | None) -> None:
    made = workload(tmp_path, stated, quantize=quantize, peft="lora")
    assert (made.quantize, made.config.get("quantization_config")) == (quantize, None)


@pytest.mark.parametrize(
    ("stated", "options", "message", "hint"),
    [
        (QLORA, {}, "with load_in_4bit, and nothing asks for it", f"give --quantize 4bit and --peft lora; or {COPY}"),
        (QLORA, {"quantize": "8bit", "peft": "lora"}, "with load_in_4bit, and --quantize says 8bit",
         f"give --quantize 4bit; or {COPY}"),
        (BitsAndBytesConfig(load_in_4bit=True).to_dict(), {"quantize": "4bit", "peft": "lora"},
         "with bnb_4bit_quant_type 'fp4', and --quantize 4bit measures 'nf4'", f"change it, or {COPY}"),
        ({**QLORA, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]}, {"quantize": "4bit", "peft": "lora"},
         "that leaves layers.1.mlp as they are, and --quantize 4bit does not", COPY),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, {},
         "with quant_method 'mxfp4', which is not measured",
         f"{COPY}; its weights are then in --dtype, or with --quantize and --peft lora in few bits"),
    ],
)  # fmt: skip
def test_any_other_is_refused(tmp_path: Path, stated: Any, options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        workload(tmp_path, stated, **options)
    assert caught.value.message == f"the config of {tmp_path} states a quantization_config {message}"
    assert caught.value.hint == hint
