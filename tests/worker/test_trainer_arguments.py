"""Test that a trial trains with the candidate's ``TrainingArguments``, however autotune was launched."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Device
from autotune.core.placement import Placement
from autotune.execution.child_process import server_environment
from autotune.space.training_arguments import checkpointing_field

SCRIPT = Path(__file__).with_name("print_arguments.py")

CANDIDATES = {
    "defaults": Candidate(Arm(), 8, 1),
    "bf16": Candidate(Arm("bf16"), 16, 2),
    "checkpointing": Candidate(Arm("fp32", gradient_checkpointing=True), 4, 64),
    "adafactor": Candidate(Arm("bf16", optim="adafactor"), 1, 1),
}

# What torchrun, accelerate launch and mpirun leave behind in the second of four processes.
LAUNCHED = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none",
    "ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "1",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1",
    "PMI_SIZE": "4", "PMI_RANK": "1", "MV2_COMM_WORLD_SIZE": "4",
}  # fmt: skip


@pytest.fixture(scope="module")
def printed(cpu: Device) -> dict[str, dict[str, Any]]:
    """The arguments of every candidate, from one process in a launched environment."""
    environment = server_environment(Placement.of(cpu), {**os.environ, **LAUNCHED}, offline=True)
    asked = "".join(json.dumps(candidate.parameters()) + "\n" for candidate in CANDIDATES.values())
    told = warm.output_of(str(SCRIPT), "cpu", env=environment, input=asked)
    return dict(zip(CANDIDATES, map(json.loads, told.splitlines()), strict=True))


@pytest.mark.parametrize("name", CANDIDATES)
def test_they_are_the_candidates(printed: dict[str, dict[str, Any]], name: str) -> None:
    candidate, arguments = CANDIDATES[name], printed[name]
    arm = candidate.arm
    assert arguments["per_device_train_batch_size"] == candidate.per_device_train_batch_size
    assert arguments["train_batch_size"] == candidate.per_device_train_batch_size
    # Never more micro-steps than the candidate has, and a few stand for many.
    assert arguments["gradient_accumulation_steps"] == min(3, candidate.gradient_accumulation_steps)
    assert (arguments["bf16"], arguments["fp16"], arguments["tf32"]) == (arm.precision == "bf16", False, False)
    checkpointing = checkpointing_field(arguments)
    assert arguments[checkpointing] is arm.gradient_checkpointing
    assert arguments[f"{checkpointing}_kwargs"] == ({"use_reentrant": False} if arm.gradient_checkpointing else None)
    assert arguments["optim"] == arm.optim


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_trial_is_alone(printed: dict[str, dict[str, Any]], name: str) -> None:
    arguments = printed[name]
    assert (arguments["world_size"], arguments["process_index"], arguments["n_gpu"]) == (1, 0, 0)
    assert arguments["parallel_mode"] == "not_parallel"
    assert arguments["fsdp"] in (None, [], "", False)
    assert arguments["deepspeed"] is None


def test_nothing_is_saved_or_reported(printed: dict[str, dict[str, Any]]) -> None:
    arguments = printed["defaults"]
    assert (arguments["save_strategy"], arguments["eval_strategy"]) == ("no", "no")
    assert arguments["report_to"] in ([], ["none"], "none")
    assert arguments["disable_tqdm"] is True
    assert arguments["files"] == []
    assert arguments["seed"] == 7
    # Two to warm up, and three times the most that are measured: as long as slow steps are waited for.
    assert arguments["max_steps"] == 38
