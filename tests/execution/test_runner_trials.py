"""Test a trial server with real trials of a tiny model on the CPU."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from processes import all_gone, children, is_alive, processes_named
from run_trial import run_trial
from tiny import ENDLESS, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Device
from autotune.core.messages import Progress
from autotune.core.outcome import Completed
from autotune.execution import TrialServer

CONTROLLER = Path(__file__).with_name("controller.py")
SERVER = "autotune.worker.server"

Servers = Callable[[], list[int]]

# As in the second of two processes that torchrun started; nobody listens at that address.
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(scope="module")
def servers() -> Servers:
    """The servers that tests of this module started; other modules may keep theirs."""
    others = processes_named(SERVER, children(os.getpid()))
    return lambda: [pid for pid in processes_named(SERVER, children(os.getpid())) if pid not in others]


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner's folder for temporary files."""
    return tmp_path_factory.mktemp("tmp")


@pytest.fixture(scope="module")
def runner(
    cpu: Device, servers: Servers, temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrialServer]:
    """A warm runner, started where a distributed launch left its traces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        for name, value in LAUNCHED.items():
            patch.setenv(name, value)
        # The first server starts cold, as users do.
        with contextlib.ExitStack() as stack:
            with warm.cold():
                server = TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path_factory.mktemp("logs"))
                started = stack.enter_context(server)
                model = started.inspect().model
            assert model.class_name == "BertForSequenceClassification"
            yield started


def trial_of(server: int) -> int:
    (trial,) = children(server)
    return trial


def test_a_trial_completes_alone_although_launched_among_others(runner: TrialServer, tmp_path: Path) -> None:
    records: list[Progress] = []
    log = tmp_path / "trial.log"
    outcome = run_trial(runner, candidate=Candidate(Arm(), 4, 2), progress=records.append, log_path=log)
    assert isinstance(outcome, Completed), outcome
    assert outcome.measurement.samples_per_second == pytest.approx(8 / outcome.measurement.step_seconds)
    assert [record.phase for record in records if record.phase] == ["device", "model", "trainer", "train"]
    assert 1 in [record.step for record in records]
    assert "train_runtime" in log.read_text()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (log, runner.server_log)] == [0o600, 0o600]


def test_the_server_imports_no_more_than_its_workload_needs(runner: TrialServer, servers: Servers) -> None:
    """Reading datasets, with Apache Arrow, is for workloads with data of one's own."""
    (pid,) = servers()
    loaded = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" in loaded
    assert "libarrow" not in loaded


def test_the_time_limit_ends_a_trial_in_full_swing(runner: TrialServer, temporary: Path) -> None:
    records: list[Progress] = []
    outcome = run_trial(runner, effort=ENDLESS, timeout_seconds=1.0, progress=records.append)
    phases = ["", *(record.phase for record in records if record.phase)]
    assert (outcome.reason, outcome.during) == ("timeout", phases[-1])
    assert outcome.message.startswith("stopped after the time limit of 1 s")
    # torch makes a cache for all processes of a user where nothing has told it of another.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert isinstance(run_trial(runner), Completed)


def test_a_killed_controller_takes_everything_along(tmp_path: Path) -> None:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    environment = {**variables, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    with warm.Popen(
        [sys.executable, str(CONTROLLER), str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    ) as controller:
        try:
            for line in controller.stdout:
                if "step" in line:
                    break
            (server,) = processes_named(SERVER, children(controller.pid))
            trial = trial_of(server)
            assert is_alive(trial)
        finally:
            # The end of the block waits for it.
            controller.kill()
    assert all_gone([server, trial])


# The last test of the module: it takes the shared server down.
def test_a_lost_server_is_replaced_and_closing_leaves_no_process(runner: TrialServer, servers: Servers) -> None:
    (server,) = servers()
    pids = [server]

    def kill(record: Progress) -> None:
        if record.step == 1:
            pids.append(trial_of(server))
            os.kill(server, signal.SIGKILL)

    outcome = run_trial(runner, effort=ENDLESS, progress=kill)
    assert outcome.reason == "lost"
    assert isinstance(run_trial(runner), Completed)
    pids += servers()
    assert len(pids) == 3
    runner.close()
    assert all_gone(pids)
    assert servers() == []
