"""Trials with each of DeepSpeed's stages: real processes on the CPU. Run with ``make test-deepspeed``.

DeepSpeed compiles a library for ranks on a CPU when they first run, for two minutes.
"""

import importlib.util
from pathlib import Path

import pytest
from run_trial import run_trial
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Device
from autotune.core.outcome import Completed, Effort
from autotune.core.placement import Placement
from autotune.core.rehearsal import RehearsalWork
from autotune.core.units import GIB
from autotune.execution import TrialServer

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
SHORT = Effort(warmup_steps=1, min_steps=2, max_steps=2, max_seconds=5.0)
FIRST_SECONDS = 280.0
"""For a trial in which DeepSpeed compiles its library."""


@pytest.mark.parametrize(
    ("arm", "accumulation"),
    [
        (Arm("fp32", strategy="zero1", ranks=2), 1),
        (Arm("bf16", gradient_checkpointing=True, strategy="zero3", ranks=2), 4),
        (Arm("bf16", strategy="zero2", ranks=4), 2),
        (Arm("bf16", strategy="zero3", ranks=4), 1),
        (Arm("bf16", strategy="zero2-offload", ranks=1), 2),
    ],
    ids=lambda value: f"{value.strategy} {value.ranks}" if isinstance(value, Arm) else str(value),
)
def test_a_trial_of_each_stage_trains(cpu: Device, tmp_path: Path, arm: Arm, accumulation: int) -> None:
    with TrialServer(Placement.of(*[cpu] * arm.ranks), tiny_workload("bert-tiny"), tmp_path / "logs") as server:
        candidate = Candidate(arm, 2, accumulation)
        outcome = run_trial(server, candidate=candidate, effort=SHORT, timeout_seconds=FIRST_SECONDS)
    assert isinstance(outcome, Completed), outcome
    measured = outcome.measurement
    assert measured.samples_per_second == pytest.approx(candidate.samples_per_step / measured.step_seconds)


def test_ranks_of_the_third_stage_evaluate_and_save(cpu: Device, tmp_path: Path) -> None:
    candidate = Candidate(Arm("bf16", strategy="zero3", ranks=2), 2, 2)
    with TrialServer(Placement.of(cpu, cpu), tiny_workload("bert-tiny"), tmp_path / "logs") as server:
        devices = server.placement.rank_devices
        found = server.rehearse(RehearsalWork(candidate, devices, 8 * GIB, 8 * GIB, 42), FIRST_SECONDS)
    assert (found.problem, found.unknown) == (None, ()), (tmp_path / "logs" / "rehearsal.log").read_text()
    assert found.evaluation is not None
    assert found.saving is not None
