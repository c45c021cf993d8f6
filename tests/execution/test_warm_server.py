"""Test the idle trial server that a service keeps between searches."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import all_gone, children, is_alive, processes_named
from run_trial import run_trial
from tiny import tiny_workload

from autotune.core.candidate import Arm
from autotune.core.device import Chip, Device
from autotune.core.placement import Placement
from autotune.core.prediction import PredictionWork
from autotune.core.workload import Workload
from autotune.execution import TrialServer, WarmServer

TINY = tiny_workload("bert-tiny")


def servers() -> list[int]:
    """The process ids of the servers that stand in."""
    return processes_named("stand_in_server", children(os.getpid()))


@pytest.fixture
def warm(stand_in: None) -> Iterator[WarmServer]:
    with WarmServer() as warm:
        yield warm


def search(device: Device, folder: Path, warm: WarmServer, workload: Workload = TINY) -> tuple[int, list[str]]:
    """Run a trial as a search does; return the server's process id and what was said of its start."""
    said: list[str] = []
    with TrialServer(device, workload, folder, lambda: said.append("start"), warm) as server:
        assert run_trial(server, "complete").state == "completed"
        (pid,) = servers()
    return pid, said


def test_the_next_search_has_the_same_server(cpu: Device, tmp_path: Path, warm: WarmServer) -> None:
    first, said = search(cpu, tmp_path / "one", warm)
    assert said == ["start"]
    assert (warm.pid, servers()) == (first, [first])
    with TrialServer(cpu, tiny_workload("gpt2-tiny"), tmp_path / "two", lambda: said.append("start"), warm) as server:
        assert run_trial(server, "complete").state == "completed"
        assert servers() == [first]
        # Its own output goes to the log of the search that it works for.
        assert os.readlink(f"/proc/{first}/fd/1") == str(tmp_path / "two" / "server.log")
    assert said == ["start"]
    warm.close()
    assert all_gone([first])


def test_a_server_is_started_before_there_is_a_search(cpu: Device, tmp_path: Path, warm: WarmServer) -> None:
    warm.prepare(Placement.of(cpu), os.environ)
    idle = warm.pid
    warm.prepare(Placement.of(cpu), os.environ)
    assert warm.pid == idle
    assert search(cpu, tmp_path / "one", warm) == (idle, [])
    assert search(cpu, tmp_path / "two", warm) == (idle, [])


@pytest.mark.parametrize("why", ["adapters", "variables", "versions", "killed", "no longer there"])
def test_a_server_that_would_not_do_is_ended(
    cpu: Device, tmp_path: Path, warm: WarmServer, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = search(cpu, tmp_path / "one", warm)
    workload = TINY
    if why == "adapters":
        workload = dataclasses.replace(TINY, peft="lora", lora_rank=8)
    elif why == "variables":
        monkeypatch.setenv("MKL_NUM_THREADS", "1")
    elif why == "versions":
        monkeypatch.setattr("autotune.execution.server_process.version_of", lambda package: "99")
    elif why == "killed":
        os.kill(first, signal.SIGKILL)
    else:
        # It ends when it is asked to go on, as where a model's code starts CUDA on import.
        os.kill(first, signal.SIGTERM)
    second, said = search(cpu, tmp_path / "two", warm, workload)
    assert second != first
    assert said in (["start"], [])
    assert all_gone([first])


def test_a_server_that_runs_something_is_not_kept(cpu: Device, tmp_path: Path, warm: WarmServer) -> None:
    with TrialServer(cpu, TINY, tmp_path / "one", None, warm) as server:
        server.submit("hang", PredictionWork(Arm(), Chip(), 1, 1, (), None), 600)
        (pid,) = servers()
    assert warm.pid is None
    assert all_gone([pid])


def test_the_imports_of_a_real_server_do_for_another_model(cpu: Device, tmp_path: Path) -> None:
    with WarmServer() as warm:
        warm.prepare(Placement.of(cpu), os.environ)
        idle = warm.pid
        assert idle is not None
        with TrialServer(cpu, tiny_workload("gpt2-tiny"), tmp_path / "logs", None, warm) as server:
            assert run_trial(server).state == "completed"
        assert warm.pid == idle
        assert is_alive(idle)
    assert all_gone([idle])
