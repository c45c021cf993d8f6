"""What the worker says of an environment and a model before the first trial."""

from __future__ import annotations

import importlib.metadata
import platform

import pytest
from server_client import ServerClient
from tiny import ONE_OF_EACH_TASK, tiny_workload

from autotune import catalog
from autotune.workload import Task


@pytest.mark.parametrize(
    "task", ["sequence-classification", "causal-lm", "seq2seq-lm", "image-classification", "speech-seq2seq"]
)
def test_the_model_is_described_without_being_built_in_memory(trial_server: ServerClient, task: Task) -> None:
    name = ONE_OF_EACH_TASK[task]
    entry = catalog.find(name)
    assert entry is not None
    model = trial_server.inspect(tiny_workload(name))["model"]
    assert model["parameters"] == entry.parameters
    assert 0 < model["trainable_parameters"] <= entry.parameters
    assert {"eager", "sdpa"} <= set(model["attn_implementations"])
    assert model["gradient_checkpointing"] is True


def test_the_environment_is_that_of_the_trials(trial_server: ServerClient) -> None:
    facts = trial_server.inspect(tiny_workload("bert-tiny"))
    assert facts["context_bytes"] == 0
    environment = facts["environment"]
    assert environment["python"] == platform.python_version()
    for package in ("torch", "transformers", "accelerate"):
        assert environment["packages"][package] == importlib.metadata.version(package)
    assert environment["cuda"] is None
    fields = environment["training_arguments_fields"]
    assert {"bf16", "tf32", "optim", "use_cpu", "per_device_train_batch_size"} <= set(fields)


@pytest.mark.parametrize(
    ("config", "task", "words"),
    [
        ({"hidden_size": 130, "num_attention_heads": 4}, None, "hidden"),
        ({"model_type": "no-such-type"}, "causal-lm", "no-such-type"),
        ({}, "image-classification", "no image-classification model of type 'bert'"),
        ({"hidden_act": "no-such-activation"}, None, "no-such-activation"),
    ],
)
def test_a_model_that_cannot_be_built_is_told(
    trial_server: ServerClient, config: dict[str, object], task: Task | None, words: str
) -> None:
    facts = trial_server.inspect(tiny_workload("bert-tiny", config=config, task=task))
    assert words in facts["model_error"]
    assert "model" not in facts
    assert facts["environment"]["packages"]["torch"]


def test_asking_for_the_capability_on_import_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bitsandbytes does, which transformers imports by way of peft."""
    import torch

    from autotune.device import CAPABILITY_VARIABLE
    from autotune.worker import server

    monkeypatch.setenv(CAPABILITY_VARIABLE, "8.6")
    before = torch.cuda.get_device_capability
    with server._cuda_not_started():
        assert torch.cuda.get_device_capability(torch.cuda.device(0)) == (8, 6)
        # As torchao does, through triton.
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_properties(0).major == 8
    assert torch.cuda.get_device_capability is before
