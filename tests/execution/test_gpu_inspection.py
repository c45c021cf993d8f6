"""Test the inspection of the GPU in a process beside the trial server."""

import itertools
import os
from pathlib import Path

import pytest
from processes import children, processes_named, wait_until
from tiny import tiny_workload

from autotune.core.device import Device
from autotune.core.errors import TrialServerError
from autotune.core.inspection import Inspection, Software
from autotune.core.placement import Placement
from autotune.devices.nvml import NvmlSession
from autotune.execution import TrialServer, WarmServer
from autotune.execution.oneshot import GpuInspection, with_gpu_facts

GPU = Placement.of(Device("cuda", 0, "GPU-1", "A GPU", 2**34, None, None, None))

ANSWER = """
import json, os, sys
job = json.loads(sys.stdin.readline())
chip = {"name": f"{job['work']} on {os.environ['CUDA_VISIBLE_DEVICES']}"}
answer = {"context_bytes": 5, "chip": chip, "cuda": "13.0", "cudnn": None, "cublas": None}
os.write(int(sys.argv[1]), json.dumps(answer).encode())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that inspects the GPU; it answers."""
    path = tmp_path / "tells_of_gpu.py"
    path.write_text(ANSWER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("autotune.execution.oneshot._MODULE", "tells_of_gpu")
    return path


@pytest.mark.usefixtures("program")
def test_a_process_of_its_own_tells(tmp_path: Path) -> None:
    """It sees the one GPU, and its facts go before those of the server, which has no GPU."""
    inspection = GpuInspection(GPU, convolves=True)
    inspection.begin(tmp_path)
    inspection.begin(tmp_path)
    told = inspection.finish()
    assert told.chip.name == "{'device_uuid': 'GPU-1', 'convolves': True, 'ranks': 1} on GPU-1"
    facts = with_gpu_facts(Inspection(Software("3.12", {}, ())), told)
    assert facts.context_bytes == 5
    assert facts.chip == told.chip
    assert (facts.software.cuda, facts.software.python) == ("13.0", "3.12")


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_what_it_told_is_kept(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disturbed: bool
) -> None:
    """For the next search, unless the memory in use on the GPU changed meanwhile."""
    program.write_text(ANSWER.replace('"context_bytes": 5', '"context_bytes": os.getpid()'))
    in_use = itertools.count() if is_disturbed else itertools.repeat(0)
    monkeypatch.setattr(NvmlSession, "used_bytes", lambda session, uuid: next(in_use))
    with WarmServer() as warm:
        told = []
        for _ in range(2):
            inspection = warm.inspection(GPU, convolves=False)
            inspection.begin(tmp_path)
            told.append(inspection.finish())
            inspection.close()
        assert (told[0] != told[1]) == is_disturbed
        assert warm.inspection(GPU, convolves=True) is not inspection


def test_an_answer_of_another_version_is_told(program: Path, tmp_path: Path) -> None:
    program.write_text(ANSWER.replace('"context_bytes": 5', '"context_bytes": "5"'))
    inspection = GpuInspection(GPU, convolves=True)
    inspection.begin(tmp_path)
    with pytest.raises(TrialServerError, match=r"malformed GpuFacts: Expected `int`, got `str` - at `\$.con"):
        inspection.finish()


def test_without_cuda_it_says_so(tmp_path: Path) -> None:
    """The real process, on a machine that has none; also where the first one began before there was a log."""
    inspection = GpuInspection(GPU, convolves=False)
    inspection.begin()
    inspection.begin(tmp_path)
    with pytest.raises(TrialServerError, match=r"the device cuda:0 could not be inspected: .*(NVIDIA|CUDA)") as refused:
        inspection.finish()
    assert refused.value.hint.startswith(f"see {tmp_path / 'inspect_gpu.log'}; if torch has no CUDA, install it")


def test_a_cpu_needs_none(tmp_path: Path, cpu: Device) -> None:
    inspection = GpuInspection(Placement.of(cpu), convolves=False)
    inspection.begin(tmp_path)
    assert inspection.finish() is None
    assert not list(tmp_path.iterdir())


def test_no_trial_runs_beside_it(program: Path, tmp_path: Path) -> None:
    """Where the answer is remembered, the process has ended before there are trials."""
    program.write_text("import sys, time; sys.stdin.readline(); time.sleep(60)")
    with WarmServer() as warm:
        inspection = warm.inspection(GPU, convolves=False)
        server = TrialServer(GPU, tiny_workload("bert-tiny"), tmp_path / "logs", lambda: None, warm)
        inspection.begin(tmp_path)
        assert wait_until(lambda: bool(processes_named("tells_of_gpu", children(os.getpid()))))
        server.run_as_inspected(tiny_workload("bert-tiny"))
        assert not processes_named("tells_of_gpu", children(os.getpid()))
