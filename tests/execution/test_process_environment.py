"""Test the environment variables of a trial server."""

import os
import sys

import pytest

from autotune.core.device import Device
from autotune.core.placement import Placement
from autotune.execution.child_process import server_environment


def gpu(uuid: str) -> Device:
    return Device("cuda", 3, uuid, "a GPU", 2**34, None, None, None)


def test_devices_are_named_by_uuid_in_the_order_of_the_ranks() -> None:
    ranks = Placement.of(gpu("GPU-b"), gpu("GPU-a"))
    environment = server_environment(ranks, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, offline=True)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


def test_a_cpu_sees_no_gpu(cpu: Device) -> None:
    assert server_environment(Placement.of(cpu), {}, offline=True)["CUDA_VISIBLE_DEVICES"] == "-1"


@pytest.mark.parametrize(
    "name",
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED",
     "ACCELERATE_MIXED_PRECISION", "FSDP_VERSION", "TORCHELASTIC_RESTART_COUNT", "OMPI_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALRANKID", "PARALLELISM_CONFIG_DP_SHARD_SIZE"],
)  # fmt: skip
def test_traces_of_a_launch_are_removed(cpu: Device, name: str) -> None:
    current = {name: "1", "HOME": "/home/someone", "OMP_NUM_THREADS": "2", "FRANK": "stays"}
    environment = server_environment(Placement.of(cpu), current, offline=True)
    assert name not in environment
    assert {key: environment[key] for key in ("HOME", "OMP_NUM_THREADS", "FRANK")} == {
        "HOME": "/home/someone", "OMP_NUM_THREADS": "2", "FRANK": "stays"
    }  # fmt: skip
    assert current[name] == "1", "the caller's own environment is left alone"


@pytest.mark.parametrize(
    "name",
    ["AUTOTUNE_TOKEN", "AUTOTUNE_STORAGE", "AUTOTUNE_AGENT_STORAGE", "AUTOTUNE_SERVER", "AUTOTUNE_ANY_LATER_ONE",
     "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"],
)  # fmt: skip
def test_no_secret_of_autotune_reaches_a_trial(cpu: Device, name: str) -> None:
    current = {name: "a secret", "HF_TOKEN": "hf_theirs", "WANDB_API_KEY": "theirs"}
    for own_code in (False, True):
        environment = server_environment(Placement.of(cpu), current, offline=True, own_code=own_code)
        assert "a secret" not in environment.values()
        assert (environment["HF_TOKEN"], environment["WANDB_API_KEY"]) == ("hf_theirs", "theirs")


def test_only_weights_need_the_hub(cpu: Device) -> None:
    assert server_environment(Placement.of(cpu), {}, offline=True)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in server_environment(Placement.of(cpu), {}, offline=False)


def test_what_can_be_imported_here_can_be_imported_there(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    environment = server_environment(Placement.of(cpu), {}, offline=True)
    assert environment["PYTHONPATH"] == f"{os.getcwd()}{os.pathsep}/somewhere"


def test_several_ranks_have_the_threads_that_torchrun_gives_them(cpu: Device) -> None:
    ranks = Placement.of(cpu, cpu)
    assert server_environment(ranks, {}, offline=True)["OMP_NUM_THREADS"] == "1"
    assert server_environment(ranks, {"OMP_NUM_THREADS": "3"}, offline=True)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in server_environment(Placement.of(cpu), {}, offline=True)
