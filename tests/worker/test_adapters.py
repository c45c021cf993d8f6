"""LoRA and few bits: what is trained and what is frozen, in real trials where peft and bitsandbytes are installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import AMPLE_BYTES, ONE_OF_EACH_TASK, QUICK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.inspection import AfterStep
from autotune.core.outcome import Completed
from autotune.core.placement import Placement
from autotune.core.workload import Task, Workload
from autotune.devices import find_device
from autotune.execution import TrialJob, TrialServer, run_trial

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'autotune[peft]'")

CHECKPOINTED = Candidate(Arm(gradient_checkpointing=True), 2)


def lora(workload: Workload, **changes: object) -> Workload:
    return dataclasses.replace(workload, **{"peft": "lora", "lora_rank": 4, **changes})


@pytest.fixture(params=sorted(ONE_OF_EACH_TASK))
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrialServer]:
    task: Task = request.param
    with TrialServer(find_device("cpu"), lora(tiny_workload(ONE_OF_EACH_TASK[task], task=task)), tmp_path) as started:
        yield started


def trained(runner: TrialServer, candidate: Candidate = CHECKPOINTED) -> None:
    log = runner.server_log.with_name("trial.log")
    outcome = run_trial(runner, TrialJob("trial", candidate, AMPLE_BYTES, QUICK, 42, 240.0, str(log)))
    assert isinstance(outcome, Completed), outcome


def test_every_task_trains_adapters_over_frozen_weights(runner: TrialServer) -> None:
    model = runner.inspect().model
    assert model is not None
    assert 0 < model.trainable_parameters < model.parameters / 2
    trained(runner)


def test_the_inspection_of_several_ranks_shards_adapters_and_trains_them_on_fake_tensors(tmp_path: Path) -> None:
    cpu = find_device("cpu")
    with TrialServer(Placement.of(cpu, cpu), lora(tiny_workload("bert-tiny")), tmp_path) as started:
        model = started.inspect().model
    assert model is not None
    assert (model.layer_classes, model.sharding_error) == (("BertLayer",), None)
    assert model.after_step == AfterStep((), ())


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_few_bits_train_too(bits: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    workload = lora(tiny_workload("bert-tiny"), dtype="bfloat16", quantize=bits)
    with TrialServer(find_device("cpu"), workload, tmp_path) as started:
        trained(started)
