"""Searches over training code of the user's own on two ranks: real processes on the CPU."""

import json
import shlex
from pathlib import Path

import pytest
from searching import RecordingObserver

from autotune.core.device import Device
from autotune.core.outcome import Completed
from autotune.core.training_source import find_script, find_trainer
from autotune.core.workload import Workload
from autotune.results.export import make_export, render, render_launch
from autotune.results.warnings import notes
from autotune.tuning.request import SearchRequest
from autotune.tuning.run import run_search

SCRIPT = """
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments
config = AutoConfig.for_model("bert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
samples = [{"input_ids": torch.arange(12), "labels": torch.tensor(n % 2)} for n in range(512)]
def build(overrides):
    arguments = TrainingArguments(output_dir="out", **overrides)
    return Trainer(AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=samples)
if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    Trainer(AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=samples).train()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script, which also has a function that builds a Trainer."""
    monkeypatch.chdir(tmp_path)
    # As warm processes have it: code of one's own may use the hub, else.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["script", "function"])
def test_own_code_is_searched_on_two_ranks(cpu: Device, folder: Path, kind: str) -> None:
    if kind == "script":
        words = ["torchrun", "--standalone", "--nproc_per_node", "2", "train.py", "--output_dir", "out"]
        source = find_script([*words, "--per_device_train_batch_size", "4", "--use_cpu"], 2)
    else:
        source = find_trainer(f"{folder / 'train.py'}:build")
    request = SearchRequest(
        Workload.of_source(source), cpu, others=(cpu,), world_size=2, effective_batch=32, trials=2, study="own",
        precisions=("fp32",), gradient_checkpointing="off", optims=(),
    )  # fmt: skip
    study, report = run_search(request, str(folder / "studies.db"), RecordingObserver())
    assert study.state == "finished"
    best, baseline = report.best, report.baseline
    assert best is not None
    assert baseline is not None
    for trial in (best, baseline):
        assert isinstance(trial.outcome, Completed), trial.outcome
        assert trial.outcome.measurement.ranks == 2
        assert (trial.candidate.arm.strategy, trial.candidate.arm.ranks) == ("ddp", 2)
    assert best.candidate.samples_per_step == 32
    # As it trains without us: its own batch on each rank.
    assert baseline.candidate.per_device_train_batch_size == (4 if kind == "script" else 8)
    batch = 2 * baseline.candidate.per_device_train_batch_size
    assert f"your own settings train at effective batch {batch}, not 32" in notes(report)
    export = make_export(report)
    words = shlex.split(render_launch(export, "torchrun"))
    started = words[words.index("--nproc_per_node") + 2 :]
    own = ["train.py", "--output_dir", "out", "--per_device_train_batch_size", "4", "--use_cpu"]
    # A function has no command line to take flags from.
    assert started == ([*own, *shlex.split(render(export, "cli"))] if kind == "script" else ["train.py"])
    arguments = json.loads(render(export, "json"))
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 16
