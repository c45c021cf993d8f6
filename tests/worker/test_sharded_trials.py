"""Test trials whose two ranks shard a model with FSDP2: a real Trainer on the CPU, made to shard there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import warm
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.jobs import Job, TrialWork
from autotune.core.outcome import Effort
from autotune.core.placement import Placement
from autotune.core.units import GIB
from autotune.devices import Device

PROGRAM = Path(__file__).with_name("shard_on_cpu.py")
ARM = Arm(
    "bf16", gradient_checkpointing=True, strategy="fsdp", ranks=2, transformer_layer_cls_to_wrap="BertLayer",
    sync_each_batch=True,
)  # fmt: skip


def test_a_trial_shards_each_layer_and_measures_both_ranks(cpu: Device, tmp_path: Path) -> None:
    candidate = Candidate(ARM, 2, 4)
    effort = Effort(warmup_steps=1, min_steps=2, max_steps=2, max_seconds=5.0)
    work = TrialWork(candidate, Placement.of(cpu, cpu).rank_devices, 8 * GIB, effort, seed=1)
    job = Job("trial", tiny_workload("bert-tiny"), work, 100.0, str(tmp_path / "trial.log"))
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
