"""Test what is said of machines: of those that a stand-in NVML library plays, and of recorded files of a host."""

from pathlib import Path
from typing import Any

import pytest
from machine import Machine, write_files
from messages import check_messages

from autotune.core.units import GIB
from autotune.devices.health import Check, cpu_quota, disk_check, host_checks

_CUDA_13 = {
    "version": "2.13.0+cu130",
    "cuda": "13.0",
    "architectures": ["sm_75", "sm_80", "sm_90", "sm_100"],
    "device_count": 1,
    "error": None,
}
# How the stand-in plays each machine, and what torch says there.
MACHINES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "idle H100": ({}, _CUDA_13),
    "A100": ({"STAND_IN_CAPABILITY": "8.0"}, _CUDA_13),
    "Turing": ({"STAND_IN_CAPABILITY": "7.5"}, _CUDA_13),
    "Volta, which CUDA 13 left out": ({"STAND_IN_CAPABILITY": "7.0"}, _CUDA_13),
    "Ada, by the code for Ampere": ({"STAND_IN_CAPABILITY": "8.9"}, _CUDA_13),
    "a newer GPU, by PTX": ({"STAND_IN_CAPABILITY": "12.0"}, {**_CUDA_13, "architectures": ["sm_80", "compute_90"]}),
    "a newer GPU, without PTX": ({"STAND_IN_CAPABILITY": "12.0"}, {**_CUDA_13, "architectures": ["sm_90a", "sm_100"]}),
    "torch for CPUs": ({}, {**_CUDA_13, "version": "2.13.0+cpu", "cuda": None}),
    "old driver": ({"STAND_IN_DRIVER": "570.86"}, {**_CUDA_13, "error": "the driver is too old"}),
    "CUDA that does not start": ({}, {**_CUDA_13, "device_count": 0}),
    "no torch": ({}, {"error": "ImportError: libcudart"}),
    "GPU full of another's training": (
        {"STAND_IN_USED": "60", "STAND_IN_PROCESSES": "4242=python=61440"}, _CUDA_13
    ),
    "GPU with a desktop": ({"STAND_IN_USED": "5", "STAND_IN_PROCESSES": "7=Xorg=-"}, _CUDA_13),
    "memory of nobody": ({"STAND_IN_USED": "70"}, _CUDA_13),
    "MIG": ({"STAND_IN_MIG": "2"}, _CUDA_13),
    "MIG without instances": ({"STAND_IN_MIG": "0"}, _CUDA_13),
    "hidden GPUs": ({"CUDA_VISIBLE_DEVICES": ""}, _CUDA_13),
    "a GPU off the bus": (
        {"STAND_IN_GPUS": "2", "STAND_IN_ERRORS": "nvmlDeviceGetHandleByIndex_v2:1=15"}, _CUDA_13
    ),
    "driver of another version than its library": (
        {"STAND_IN_ERRORS": "nvmlInit=18,nvmlInitWithFlags=18"}, _CUDA_13
    ),
    "hot": ({"STAND_IN_EVENTS": "64", "STAND_IN_CELSIUS": "92"}, _CUDA_13),
    "broken memory": ({"STAND_IN_ECC": "3"}, _CUDA_13),
}  # fmt: skip


def test_messages_of_machines(machine: Machine) -> None:
    """Each is told what is wrong with it and the cure."""
    code = "from autotune.cli.doctor import torch_checks\nfrom autotune.core.schema import encode\n"
    code += "from autotune.devices.health import gpu_checks\n"
    cases = {}
    for name, (settings, torch) in MACHINES.items():
        found = machine.ask(f"{code}answer = encode([*gpu_checks(), *torch_checks({torch!r})])", **settings)
        assert len({each["name"] for each in found}) == len(found)
        cases[name] = [
            f"{each['state']} {each['name']}: {each['found']}" + (f" -> {each['cure']}" if each["cure"] else "")
            for each in found
        ]
    check_messages("machines", cases)


def test_only_the_gpus_of_a_search_are_looked_at(machine: Machine) -> None:
    code = "from autotune.devices.health import gpu_checks\n"
    code += "answer = [each.name for each in gpu_checks(['GPU-00000001-1111-2222-3333-444444444444'])]"
    assert machine.ask(code, STAND_IN_GPUS="2", STAND_IN_ECC="1") == ["NVML", "cuda:1", "cuda:1 state"]


def test_limits_of_a_container_are_told(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {60 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(3 * GIB),
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
    }
    write_files(tmp_path, files)
    memory, cores = host_checks(tmp_path)
    assert (memory.name, memory.state) == ("memory", "wrong")
    assert memory.found == "4.0 GiB, 1.0 GiB free; a control group allows that of 64.0 GiB"
    assert (cores.name, cores.state) == ("cores", "note")
    assert "the time of 0.5" in cores.found


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({}, None),
    ],
)
def test_the_quota_of_a_control_group_is_read_in_both_versions(
    files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    write_files(tmp_path / "sys/fs/cgroup", files)
    assert cpu_quota(tmp_path) == cores


def test_a_folder_that_is_not_there_yet_has_the_room_of_the_one_above(tmp_path: Path) -> None:
    found = disk_check("disk", tmp_path / "studies" / "more")
    assert isinstance(found, Check)
    assert found.state == disk_check("disk", tmp_path).state
    assert not (tmp_path / "studies").exists()
