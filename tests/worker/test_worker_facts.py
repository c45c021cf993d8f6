"""Test the facts about environment and model that the worker reports before the first trial."""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import accelerate.utils.fsdp_utils
import pytest
import torch
import warm
from server_client import ServerClient
from tiny import ONE_OF_EACH_TASK, attention_of_task, tiny_workload

from autotune.core.dataset_spec import DataSpec
from autotune.core.device import CAPABILITY_VARIABLE
from autotune.core.workload import Task
from autotune.models import catalog
from autotune.worker import imports
from autotune.worker.facts import _model_facts


@pytest.mark.parametrize(
    "task", ["sequence-classification", "causal-lm", "seq2seq-lm", "image-classification", "speech-seq2seq"]
)
def test_the_model_is_described_without_being_built_in_memory(trial_server: ServerClient, task: Task) -> None:
    name = ONE_OF_EACH_TASK[task]
    entry = catalog.find(name)
    model = trial_server.model(tiny_workload(name, config=entry.config))
    assert model.parameters == entry.parameters
    assert 0 < model.trainable_parameters <= entry.parameters
    assert {"eager", attention_of_task(task)} <= set(model.attn_implementations)
    assert model.gradient_checkpointing is True


def test_the_environment_is_that_of_the_trials(trial_server: ServerClient) -> None:
    facts = trial_server.inspect(tiny_workload("bert-tiny"))
    assert facts.context_bytes == 0
    assert facts.software.python == platform.python_version()
    for package in ("torch", "transformers", "accelerate"):
        assert facts.software.packages[package] == importlib.metadata.version(package)
    assert facts.software.cuda is None
    fields = facts.software.training_arguments_fields
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
    assert words in (facts.model_error or "")
    assert facts.model is None
    assert facts.software.packages["torch"]


def test_asking_for_the_capability_on_import_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bitsandbytes does, which transformers imports by way of peft."""
    monkeypatch.setenv(CAPABILITY_VARIABLE, "8.6")
    before = torch.cuda.get_device_capability
    with imports._cuda_not_started():
        assert torch.cuda.get_device_capability(torch.cuda.device(0)) == (8, 6)
        # As torchao does, through triton.
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_properties(0).major == 8
    assert torch.cuda.get_device_capability is before


def test_what_an_import_keeps_of_the_answers_is_real_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch._dynamo`` keeps the functions, caches keep what they gave; torchao's optimizers compile with both."""
    real = types.SimpleNamespace(major=8, minor=6, multi_processor_count=82)
    monkeypatch.setenv(CAPABILITY_VARIABLE, "8.6")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: real)
    with imports._cuda_not_started():
        kept_function = torch.cuda.get_device_properties
        kept = kept_function(0)
        assert kept is not real
    assert kept_function(0) is real
    assert (kept.major, kept.multi_processor_count) == (8, 82)


def test_an_accelerate_without_fsdp2_is_the_reason_for_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(accelerate.utils.fsdp_utils, "fsdp2_prepare_model", raising=False)
    facts = _model_facts(tiny_workload("bert-tiny"), 1)
    assert facts.layer_classes == ()
    assert facts.sharding_error == f"version {accelerate.__version__} has no FSDP2, later ones have"


# With own data, each test that reads some would fail without datasets; without, tests/execution/test_runner_trials.py
# looks at a server that there is anyway.
@pytest.mark.whole
@pytest.mark.parametrize(("own_data", "imported"), [(False, False), (True, True)])
def test_the_server_imports_what_the_workload_needs(own_data: bool, imported: bool) -> None:
    workload = tiny_workload("bert-tiny")
    if own_data:
        workload = dataclasses.replace(workload, data=DataSpec("/x.jsonl", "json", ""))
    say = (
        "import json, sys; from autotune.worker.imports import import_everything; "
        "import_everything(json.loads(sys.argv[1])); import transformers; "
        "print(transformers.utils.is_datasets_available(), bool(sys.modules.get('datasets')), 'pyarrow' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", say, json.dumps(workload.document())], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == [str(imported)] * 3


def test_what_is_hidden_is_there_again_unless_it_is_hidden_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("colorsys", "wave"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with imports._without(("colorsys",), ("wave",)):
        assert importlib.util.find_spec("colorsys") is None
        assert importlib.util.find_spec("wave") is None
    assert importlib.util.find_spec("colorsys") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("wave")
    monkeypatch.delitem(sys.modules, "wave")


@pytest.mark.parametrize("convolves", [False, True])
def test_the_kernels_of_a_training_step_can_be_used(convolves: bool) -> None:
    code = "import sys, torch; from autotune.worker.trial.meter import use_kernels; "
    code += "use_kernels(torch.device('cpu'), convolves=sys.argv[1] == 'True'); print(torch.get_default_dtype())"
    assert warm.output_of("-c", code, str(convolves)) == "torch.float32\n"


CUBLAS = """
int cublasGetProperty(int part, int *value) { *value = (int[]){13, 1, 3}[part]; return part > 2; }
"""


def test_the_loaded_cublas_tells_its_version(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("no C compiler to build a stand-in for cuBLAS with")
    (tmp_path / "cublas.c").write_text(CUBLAS)
    library = tmp_path / "libcublas.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "cublas.c")], check=True)
    code = f"""
import ctypes
from autotune.worker.gpu_facts import _cublas_version
before = _cublas_version()
kept = ctypes.CDLL({str(library)!r})
print([before, _cublas_version()])
"""
    before, after = ast.literal_eval(warm.output_of("-c", code))
    # A torch that is built for CUDA has loaded a real one, which then answers.
    assert (before, after) == (None, "13.1.3") or re.fullmatch(r"\d+\.\d+\.\d+", before)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("bert-tiny", ["BertLayer"]),
        # Says nothing of what is not to be split.
        ("distilbert-base-uncased", ["TransformerBlock"]),
        ("t5-small", ["T5Block"]),
        ("whisper-tiny", ["WhisperDecoderLayer", "WhisperEncoderLayer"]),
        ("vit-tiny", ["ViTLayer"]),
    ],
)
def test_the_layers_that_can_be_sharded_one_by_one_are_found(
    trial_server: ServerClient, name: str, layers: list[str]
) -> None:
    facts = trial_server.model(tiny_workload(name))
    if facts.sharding_error is not None and "has no FSDP2" in facts.sharding_error:
        pytest.skip(facts.sharding_error)
    assert facts.layer_classes == tuple(layers)
