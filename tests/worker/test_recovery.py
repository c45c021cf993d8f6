"""Test that a training which runs out of memory late ends as an undisturbed one of the smaller batch would."""

import os
import sys
from pathlib import Path

import pytest
import torch
import warm
from test_real_training import FIELDS, TRAINER, run

from autotune.core.candidate import Arm, Candidate
from autotune.core.real_training import RealTraining
from autotune.core.training_source import find_script
from autotune.execution.oneshot import run_recovering
from autotune.space.training_arguments import training_arguments


def training(batch: int, accumulation: int, *words: str) -> RealTraining:
    """The script with this batch."""
    candidate = Candidate(Arm(optim="adamw_torch"), batch, accumulation)
    fields = dict(training_arguments(candidate, FIELDS, "cpu"))
    return RealTraining("s", find_script([*TRAINER, *words]), candidate, fields)


def recovered(folder: Path, given: RealTraining) -> tuple[int, list[str]]:
    """The exit code of a training that is started again, and what was said."""
    said: list[str] = []
    module = [sys.executable, "-m", "autotune.worker.user.real_training"]
    before = os.getcwd()
    os.chdir(folder)
    try:
        return run_recovering(module, os.environ, given, said.append), said
    finally:
        os.chdir(before)


def test_a_training_goes_on_from_its_last_checkpoint_with_half_the_batch(tmp_path: Path) -> None:
    code, said = recovered(tmp_path, training(8, 2, "hungry"))
    assert code == 0
    assert said == ["out of memory: started again from its last checkpoint with 4 × 4, restart 1 of at most 3"]
    undisturbed = run(training(4, 4, "sated", str(tmp_path / "hungry" / "checkpoint-4")), tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("hungry", "sated"))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.whole)], ids=["warm", "cold"])
def test_a_training_without_checkpoints_is_refused_before_its_first_step(tmp_path: Path, cold: bool) -> None:
    with warm.cold(cold):
        code, said = recovered(tmp_path, training(8, 2, "never-saves"))
    assert (code, said) == (10, [])


def test_the_next_smaller_batch_keeps_the_effective_batch() -> None:
    given: RealTraining | None = training(6, 3)
    pairs = []
    while given is not None:
        candidate = given.candidate
        pairs.append((candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps))
        given = given.with_smaller_batch()
    assert pairs == [(6, 3), (3, 6), (1, 18)]
