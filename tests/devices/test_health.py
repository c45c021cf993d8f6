"""Test what is said of machines: of those that a stand-in NVML library plays, and of recorded files of a host."""

from pathlib import Path
from typing import Any

import pytest
from machine import Machine

from autotune.core.units import GIB
from autotune.devices.health import Check, cpu_quota, disk_check, host_checks

_CUDA_13 = {
    "version": "2.13.0+cu130",
    "cuda": "13.0",
    "architectures": ["sm_75", "sm_80", "sm_90", "sm_100"],
    "device_count": 1,
    "error": None,
}
OK = ("torch", "ok", "2.13.0+cu130, CUDA 13.0", None)

# Of each machine: how the stand-in plays it, what torch says there, and lines that have to be among the answer; of each
# line its name, its state, and words that what was found and its cure hold.
MACHINES: dict[str, tuple[dict[str, str], dict[str, Any], list[tuple[str, str, str, str | None]]]] = {
    "idle H100": (
        {},
        _CUDA_13,
        [
            OK,
            ("NVML", "ok", "driver 580.1, 1 visible", None),
            ("cuda:0", "ok", "9.0: fp32, tf32, fp16, bf16, fp8", None),
        ],
    ),
    "A100": ({"STAND_IN_CAPABILITY": "8.0"}, _CUDA_13, [OK, ("cuda:0", "ok", "bf16, flash attention", None)]),
    "Turing": ({"STAND_IN_CAPABILITY": "7.5"}, _CUDA_13, [OK, ("cuda:0", "note", "no bf16", "fp16 or fp32")]),
    "Volta, which CUDA 13 left out": (
        {"STAND_IN_CAPABILITY": "7.0"},
        _CUDA_13,
        [
            (
                "torch",
                "wrong",
                "no code for Stand-in GPU (compute capability 7.0)",
                "install a torch that is built for it",
            )
        ],
    ),
    "Ada, by the code for Ampere": (
        {"STAND_IN_CAPABILITY": "8.9"},
        _CUDA_13,
        [OK, ("cuda:0", "ok", "fp8, flash attention", None)],
    ),
    "a newer GPU, by PTX": (
        {"STAND_IN_CAPABILITY": "12.0"},
        {**_CUDA_13, "architectures": ["sm_80", "compute_90"]},
        [OK],
    ),
    "a newer GPU, without PTX": (
        {"STAND_IN_CAPABILITY": "12.0"},
        {**_CUDA_13, "architectures": ["sm_90a", "sm_100"]},
        [("torch", "wrong", "compute capability 12.0", "built for it")],
    ),
    "torch for CPUs": (
        {},
        {**_CUDA_13, "version": "2.13.0+cpu", "cuda": None},
        [("torch", "wrong", "without CUDA, and there are GPUs", "pytorch.org")],
    ),
    "old driver": (
        {"STAND_IN_DRIVER": "570.86"},
        {**_CUDA_13, "error": "the driver is too old"},
        [("torch", "wrong", "the driver is too old", "update the driver to 580 or newer")],
    ),
    "CUDA that does not start": (
        {},
        {**_CUDA_13, "device_count": 0},
        [("torch", "wrong", "it finds no GPU", "see to the driver")],
    ),
    "no torch": ({}, {"error": "ImportError: libcudart"}, [("torch", "wrong", "libcudart", "--force-reinstall torch")]),
    "GPU full of another's training": (
        {"STAND_IN_USED": "60", "STAND_IN_PROCESSES": "4242=python=61440"},
        _CUDA_13,
        [("cuda:0 memory", "wrong", "60.0 GiB are held by python (4242, 60.0 GiB)", "--memory-limit")],
    ),
    "GPU with a desktop": (
        {"STAND_IN_USED": "5", "STAND_IN_PROCESSES": "7=Xorg=-"},
        _CUDA_13,
        [("cuda:0 memory", "note", "held by Xorg (7)", "choose another GPU")],
    ),
    "memory of nobody": (
        {"STAND_IN_USED": "70"},
        _CUDA_13,
        [("cuda:0 memory", "wrong", "held by processes without a name here", "--device")],
    ),
    "MIG": ({"STAND_IN_MIG": "2"}, _CUDA_13, [("cuda:0", "note", "2 MIG instances", "--device MIG-1 or ")]),
    "MIG without instances": ({"STAND_IN_MIG": "0"}, _CUDA_13, [("cuda:0", "wrong", "0 MIG instances", "mig -cgi")]),
    "hidden GPUs": (
        {"CUDA_VISIBLE_DEVICES": ""},
        _CUDA_13,
        [("GPU", "note", "shows none", "unset CUDA_VISIBLE_DEVICES"), OK],
    ),
    "a GPU off the bus": (
        {"STAND_IN_GPUS": "2", "STAND_IN_ERRORS": "nvmlDeviceGetHandleByIndex_v2:1=15"},
        _CUDA_13,
        [("NVML", "wrong", "GPU 1: GPU is lost", "nvidia-smi"), ("cuda:0", "ok", "Stand-in GPU", None)],
    ),
    "driver of another version than its library": (
        {"STAND_IN_ERRORS": "nvmlInit=18,nvmlInitWithFlags=18"},
        _CUDA_13,
        [("NVML", "wrong", "NVML does not start", "restart it")],
    ),
    "hot": ({"STAND_IN_EVENTS": "64", "STAND_IN_CELSIUS": "92"}, _CUDA_13, [("cuda:0 state", "note", "92 °C", "cool")]),
    "broken memory": ({"STAND_IN_ECC": "3"}, _CUDA_13, [("cuda:0 state", "wrong", "3 uncorrected", "use another one")]),
}


@pytest.mark.parametrize("name", MACHINES)
def test_each_machine_is_told_what_is_wrong_with_it_and_the_cure(name: str, machine: Machine) -> None:
    settings, torch, lines = MACHINES[name]
    code = "from autotune.cli.doctor import torch_checks\nfrom autotune.core.schema import encode\n"
    code += "from autotune.devices.health import gpu_checks\n"
    found = machine.ask(f"{code}answer = encode([*gpu_checks(), *torch_checks({torch!r})])", **settings)
    by_name = {each["name"]: each for each in found}
    assert len(by_name) == len(found)
    for what, state, words, cure in lines:
        told = by_name.pop(what)
        assert told["state"] == state, told
        assert words in told["found"]
        assert (told["cure"] is None) == (cure is None)
        assert (cure or "") in (told["cure"] or "")
    # Nothing else is found wrong there.
    assert [each for each in by_name.values() if each["state"] == "wrong"] == []


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
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
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
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == cores


def test_a_folder_that_is_not_there_yet_has_the_room_of_the_one_above(tmp_path: Path) -> None:
    found = disk_check("disk", tmp_path / "studies" / "more")
    assert isinstance(found, Check)
    assert found.state == disk_check("disk", tmp_path).state
    assert not (tmp_path / "studies").exists()
