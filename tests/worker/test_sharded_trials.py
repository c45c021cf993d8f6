"""Test trials whose two ranks shard a model with FSDP2: a real Trainer on the CPU, made to shard there."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.jobs import Job, TrialWork
from autotune.core.outcome import Effort
from autotune.core.placement import Placement
from autotune.core.protection import Protection
from autotune.core.training_source import find_trainer
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.devices import Device

PROGRAM = Path(__file__).with_name("shard_on_cpu.py")
OWN_CODE = Path(__file__).resolve().parents[1] / "own_code"
ARM = Arm(
    "bf16", gradient_checkpointing=True, strategy="fsdp", ranks=2, transformer_layer_cls_to_wrap="BertLayer",
    sync_each_batch=True,
)  # fmt: skip


def tiny_with_adapters() -> Workload:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'autotune[peft]'")
    return dataclasses.replace(tiny_workload("bert-tiny"), peft="lora", lora_rank=4)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "built in": lambda: tiny_workload("bert-tiny"),
    "own Trainer": lambda: Workload.of_source(find_trainer(f"{OWN_CODE / 'build_trainer.py'}:build")),
    "adapters": tiny_with_adapters,
}


@pytest.mark.parametrize("of", WORKLOADS)
def test_a_trial_shards_each_layer_and_measures_both_ranks(cpu: Device, tmp_path: Path, of: str) -> None:
    candidate = Candidate(ARM, 2, 4)
    effort = Effort(warmup_steps=1, min_steps=2, max_steps=2, max_seconds=5.0)
    work = TrialWork(candidate, Placement.of(cpu, cpu).rank_devices, 8 * GIB, effort, seed=1)
    job = Job("trial", WORKLOADS[of](), work, 100.0, str(tmp_path / "trial.log"), Protection())
    words = [sys.executable, str(PROGRAM), json.dumps(job.document()), str(tmp_path)]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = warm.run(words, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        outcome = json.loads((tmp_path / f"{rank}.json").read_text())
        assert outcome["state"] == "completed", (outcome, done.stderr[-3000:])
        assert outcome["shards"]["whole"] == []
        # Each layer, the embedding and the rest.
        assert {"FSDPBertLayer"} <= set(outcome["shards"]["units"]) or "FSDPCheckpointWrapper" in str(outcome["shards"])
        measured = outcome["measurement"]
        assert (measured["ranks"], measured["micro_steps_run"]) == (2, 3)
        # 2 samples × 4 micro-steps × 2 ranks.
        assert measured["samples_per_second"] == pytest.approx(16 / measured["step_seconds"])
