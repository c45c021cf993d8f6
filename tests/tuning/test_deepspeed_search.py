"""A search with DeepSpeed's ZeRO on two ranks of the CPU: real processes, from the request to a stock ``torchrun``.

Run with ``make test-deepspeed``. DeepSpeed compiles a library for ranks on a CPU when they first run, for two minutes.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from searching import RecordingObserver
from tiny import tiny_workload

from autotune.core.device import Device
from autotune.core.outcome import Completed
from autotune.results.export import make_export, render, render_launch
from autotune.tuning.request import SearchRequest
from autotune.tuning.run import run_search
from autotune.verify.target import placement_of, target_of
from autotune.verify.throughput import verify

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
FIRST_SECONDS = 280.0
"""For a trial in which DeepSpeed compiles its library."""

SCRIPT = """
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
arguments.max_steps = 2
model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained("model"))
data = [{"input_ids": torch.randint(10, 1000, (8,)), "labels": torch.tensor(0)}] * 200
trainer = Trainer(model=model, args=arguments, train_dataset=data)
steps = trainer.train().global_step
stage = trainer.accelerator.deepspeed_engine_wrapped.engine.zero_optimization_stage()
print(f"trained {steps} steps in stage {int(stage)} on {arguments.world_size} ranks")
"""


def test_a_search_over_ddp_and_zero_is_verified_by_a_stock_torchrun(cpu: Device, tmp_path: Path) -> None:
    storage = str(tmp_path / "studies.db")
    request = SearchRequest(
        tiny_workload("bert-tiny"), cpu, others=(cpu,), effective_batch=16, world_size=2, trials=3, study="zero",
        precisions=("bf16",), gradient_checkpointing="off", strategies=("zero2",),
        trial_timeout_seconds=FIRST_SECONDS,
    )  # fmt: skip
    study, report = run_search(request, storage, RecordingObserver())
    assert study.state == "finished"
    best = report.best
    assert isinstance(best.outcome, Completed)
    assert (best.candidate.arm.strategy, best.candidate.arm.ranks) == ("zero2", 2)
    assert best.candidate.samples_per_step == 16

    export = make_export(report)
    assert json.loads(render(export, "json"))["deepspeed"]["zero_optimization"]["stage"] == 2
    words = shlex.split(render_launch(export, "torchrun"))
    assert json.loads(words[words.index("--deepspeed") + 1]) == export.arguments["deepspeed"]
    config = yaml.safe_load(render_launch(export, "accelerate"))
    assert (config["distributed_type"], config["num_processes"]) == ("DEEPSPEED", 2)

    # The exported line, with a script that takes TrainingArguments; the Accelerator's file with the same script.
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_workload("bert-tiny").config))
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "accelerate.yaml").write_text(render_launch(export, "accelerate"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words[words.index("--standalone") :]]
    options = torchrun[torchrun.index("train.py") :]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", *options]
    for line in (torchrun, launch):
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("trained 2 steps in stage 2 on 2 ranks") == 2, done.stdout

    # The exported arguments, unchanged, in a Trainer that torchrun starts.
    verification = verify(target_of(report, placement_of(report)), 20, tmp_path / "verify.log")
    assert verification.obtained.state == "completed"
    assert verification.samples_timed == 16 * verification.steps_timed > 0
