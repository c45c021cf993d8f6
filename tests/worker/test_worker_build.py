"""Test that the built model has the workload's task, weight dtype and attention."""

from pathlib import Path

import pytest
import torch
from tiny import ONE_OF_EACH_TASK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.workload import DTYPES, TASKS, DTypeName, Task
from autotune.space.training_arguments import training_arguments
from autotune.worker.trial.build import build_config, build_model, model_class, model_for

CPU = torch.device("cpu")


@pytest.mark.parametrize("task", TASKS)
def test_the_class_is_the_tasks(task: Task) -> None:
    workload = tiny_workload(ONE_OF_EACH_TASK[task], task=task)
    model = build_model(workload, "eager", torch.device("meta"))
    assert type(model) is model_class(workload)
    assert model.training
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32)]
)
def test_a_model_for_deepspeed_is_built_in_the_dtype_that_it_converts_to(precision: str, dtype: torch.dtype) -> None:
    """With float32 weights, models would run out of memory that fit once they are converted."""
    arm = Arm(precision, strategy="zero2", ranks=2)
    fields = training_arguments(Candidate(arm, 8, 1), frozenset(), "cpu")
    model, _ = model_for(fields, tiny_workload("bert-tiny"), "sdpa", CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.parametrize("said", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("asked", DTYPES)
def test_weights_are_stored_as_asked_whatever_the_config_says(said: str, asked: DTypeName) -> None:
    other = "float32" if asked == "bfloat16" else "bfloat16"
    workload = tiny_workload("llama-tiny", config={said: other}, dtype=asked)
    model = build_model(workload, "sdpa", CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, asked)}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_saved_weights_are_loaded_as_asked_too(asked: DTypeName, tmp_path: Path) -> None:
    other: DTypeName = "float32" if asked == "bfloat16" else "bfloat16"
    saved = build_model(tiny_workload("gpt2-tiny", dtype=other), "eager", CPU)
    saved.save_pretrained(tmp_path)
    loaded = build_model(tiny_workload("gpt2-tiny", dtype=asked, weights=str(tmp_path)), "eager", CPU)
    assert loaded.training
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, asked)}
    for name, parameter in loaded.named_parameters():
        assert torch.allclose(parameter.float(), saved.get_parameter(name).float(), atol=1e-2), name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_is_the_one_that_was_named(attention: str) -> None:
    model = build_model(tiny_workload("bert-tiny"), attention, CPU)
    assert model.config._attn_implementation == attention


def test_decoders_that_classify_get_a_padding_token() -> None:
    assert build_config(tiny_workload("gpt2-tiny", task="sequence-classification")).pad_token_id == 0
    kept = tiny_workload("gpt2-tiny", task="sequence-classification", config={"pad_token_id": 7})
    assert build_config(kept).pad_token_id == 7
