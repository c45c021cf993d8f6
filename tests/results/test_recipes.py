"""Test the winner as a recipe of another trainer: what it says, what it refuses, and that each trainer reads it."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from messages import check_refusals
from reported import report_of
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataFacts, DataSpec
from autotune.core.schema import encode
from autotune.core.workload import Workload
from autotune.results.forms import Recipe
from autotune.results.recipes import exported_text
from autotune.results.report import Report

TRAINERS: tuple[Recipe, ...] = ("trl", "axolotl", "llama-factory")
FULL = dataclasses.replace(tiny_workload("gpt2-tiny"), dtype="bfloat16", seq_len=64)
QLORA = dataclasses.replace(FULL, peft="lora", lora_rank=8, quantize="4bit")
WINNERS: dict[str, tuple[Workload, Candidate]] = {
    "plain": (FULL, Candidate(Arm("bf16"), 8, 4)),
    "more": (
        FULL,
        Candidate(
            Arm(
                "bf16", gradient_checkpointing=True, optim="adamw_torch", use_liger_kernel=True,
                dataloader_num_workers=2, dataloader_prefetch_factor=4,
            ),
            2,
            16,
        ),
    ),
    "qlora": (QLORA, Candidate(Arm("bf16", gradient_checkpointing=True, fused_loss=True), 4, 8)),
}  # fmt: skip


def report(name: str, **arm: Any) -> Report:
    workload, candidate = WINNERS[name]
    fields = ("gradient_checkpointing", "gradient_checkpointing_kwargs", "bf16", "fp16", "tf32", "optim")
    fields += ("dataloader_num_workers", "dataloader_prefetch_factor", "use_liger_kernel", "torch_compile")
    candidate = dataclasses.replace(candidate, arm=dataclasses.replace(candidate.arm, **arm))
    return report_of(candidate, "cuda", fields, workload)


def said(name: str, form: Recipe, **arm: Any) -> dict[str, Any]:
    return yaml.safe_load(exported_text(report(name, **arm), form)[0])


@pytest.mark.parametrize("name", WINNERS)
def test_each_trainer_is_told_the_same_training(name: str) -> None:
    workload, candidate = WINNERS[name]
    trl, axolotl, factory = (said(name, form) for form in TRAINERS)
    assert trl["per_device_train_batch_size"] == factory["per_device_train_batch_size"] == axolotl["micro_batch_size"]
    assert axolotl["micro_batch_size"] == candidate.per_device_train_batch_size
    steps = candidate.gradient_accumulation_steps
    assert {each["gradient_accumulation_steps"] for each in (trl, axolotl, factory)} == {steps}
    assert trl["bf16"] is axolotl["bf16"] is factory["bf16"] is True
    checkpointing = candidate.arm.gradient_checkpointing
    assert trl["gradient_checkpointing"] is axolotl["gradient_checkpointing"] is checkpointing
    assert factory["disable_gradient_checkpointing"] is not checkpointing
    assert trl["optim"] == axolotl["optimizer"] == factory["optim"] == candidate.arm.optim
    assert axolotl["sequence_len"] == factory["cutoff_len"] == workload.seq_len
    is_lora = workload.peft is not None
    assert ("use_peft" in trl, axolotl.get("adapter"), factory["finetuning_type"]) == (
        (True, "qlora", "lora") if is_lora else (False, None, "full")
    )
    if is_lora:
        assert trl["lora_r"] == axolotl["lora_r"] == factory["lora_rank"] == workload.lora_rank
        assert trl["load_in_4bit"] is axolotl["load_in_4bit"] is True
        assert factory["quantization_bit"] == 4
    # Weights of a full training in 16 bits stay in 16 bits.
    assert (trl["dtype"], factory["pure_bf16"]) == ("bfloat16", not is_lora)


def test_a_host_that_goes_on_is_told_to_each_trainer_in_its_names() -> None:
    trl, axolotl, factory = (said("plain", form, non_blocking=True) for form in TRAINERS)
    assert trl["accelerator_config"] == axolotl["accelerator_config"] == {"non_blocking": True}
    assert (trl["logging_nan_inf_filter"], factory["logging_nan_inf_filter"]) == (False, False)
    text = exported_text(report("plain", non_blocking=True), "axolotl")[0]
    assert "# slower than measured without: logging_nan_inf_filter, which axolotl has no name for" in text


def test_what_only_costs_speed_is_named() -> None:
    text, notes = exported_text(report("qlora"), "axolotl")
    assert "# slower than measured without: fused_loss, which axolotl has no name for" in text
    assert not notes
    assert "slower than measured" not in exported_text(report("plain"), "axolotl")[0]


def test_messages_of_recipes_of_another_training() -> None:
    winner = report_of(Candidate(Arm("bf16"), 8), "cuda", ("bf16",), dataclasses.replace(FULL, dtype="float32"))
    assert yaml.safe_load(exported_text(winner, "trl")[0])["dtype"] == "float32"
    bert = report_of(Candidate(Arm("bf16"), 8), "cuda", ("bf16",))
    sharded = {"strategy": "fsdp", "ranks": 2, "transformer_layer_cls_to_wrap": "GPT2Block"}
    attention = {"attn_implementation": "flash_attention_3"}
    cases: dict[str, Callable[[], object]] = {
        "float32 weights for axolotl": partial(exported_text, winner, "axolotl"),
        "flash_attention_3 for llama-factory": partial(said, "plain", "llama-factory", **attention),
        **{f"BERT for {form}": partial(exported_text, bert, form) for form in TRAINERS},
        **{f"shards for {form}": partial(said, "plain", form, **sharded) for form in TRAINERS[1:]},
    }
    check_refusals("recipes", cases)


def test_a_model_card_says_the_settings_the_speed_and_the_machine() -> None:
    text, _ = exported_text(report("plain"), "model-card")
    assert text.startswith("## Training settings\n")
    assert "| per-device batch × accumulation | 8 × 4 |" in text
    assert "| effective batch | 32 |" in text
    assert "| measured speed | 64.0 samples/s |" in text
    assert "| measured on | A Device, torch 2.13.0, transformers 5.23.0;" in text
    block = text.split("```json\n")[1].split("```")[0]
    assert json.loads(block) == json.loads(exported_text(report("plain"), "json")[0])


def test_a_model_card_counts_all_devices_and_packed_rows() -> None:
    made = report("plain", padding_free=True)
    data = encode(DataSpec("/data/texts.jsonl", "json", "0", tokenizer="t", packing=True, facts=DataFacts(36)))
    on_four = dataclasses.replace(made.study, request={"world_size": 4})
    text, _ = exported_text(
        dataclasses.replace(made, study=on_four, workload={**made.workload, "data": data}), "model-card"
    )
    assert "| effective batch | 128 |" in text
    assert "| measured speed | 64.0 rows/s on one device |" in text


# What each trainer makes of the file; it says so in JSON, below whatever it prints besides.
LOADERS = {
    "trl": """
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser
_, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(
    ["--config", path, "--dataset_name", "any", "--output_dir", "out", "--use_cpu", "true", "--bf16", "false"])
rank = model.lora_r if model.use_peft else None
found = [training.per_device_train_batch_size, training.gradient_accumulation_steps, rank]
""",
    "axolotl": """
import yaml
from axolotl.utils.schemas.config import AxolotlInputConfig
given = yaml.safe_load(open(path)) | {"datasets": [{"path": "any", "type": "alpaca"}], "learning_rate": 1e-4}
of_plugin = {"plugins", *(name for name in given if name.startswith("liger_"))}
unknown = given.keys() - AxolotlInputConfig.model_fields.keys() - of_plugin
assert not unknown, unknown
made = AxolotlInputConfig(**given)
found = [made.micro_batch_size, made.gradient_accumulation_steps, made.lora_r]
""",
    "llama-factory": """
import yaml
from transformers import HfArgumentParser
from llamafactory.hparams import DataArguments, FinetuningArguments, ModelArguments
kinds = (ModelArguments, DataArguments, FinetuningArguments)
from transformers import TrainingArguments
import dataclasses
given = yaml.safe_load(open(path))
ours = {f.name for f in dataclasses.fields(TrainingArguments)} | {"gradient_checkpointing"}
rest = {k: v for k, v in given.items() if k not in ours}
model, data, tuning = HfArgumentParser(kinds).parse_dict(rest)
assert data.cutoff_len == given["cutoff_len"]
found = [given["per_device_train_batch_size"], given["gradient_accumulation_steps"],
         tuning.lora_rank if tuning.finetuning_type == "lora" else None]
""",
}
# Without what they pin: other versions of torch and transformers.
PACKAGES = ("trl==1.16.0", "axolotl==0.19.0", "pillow", "llamafactory==0.9.5", "omegaconf")


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the trainers."""
    folder = tmp_path_factory.mktemp("trainers")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*words, *PACKAGES], check=True, timeout=280)
    return folder


@pytest.mark.clients
@pytest.mark.parametrize("name", WINNERS)
@pytest.mark.parametrize("form", TRAINERS)
def test_each_trainer_reads_its_recipe(form: Recipe, name: str, trainers: Path, tmp_path: Path) -> None:
    workload, candidate = WINNERS[name]
    (tmp_path / "recipe.yaml").write_text(exported_text(report(name), form)[0])
    program = f"path = 'recipe.yaml'\n{LOADERS[form]}\nimport json\nprint(json.dumps(found))"
    variables = {**os.environ, "PYTHONPATH": str(trainers), "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == [candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps, workload.lora_rank]
