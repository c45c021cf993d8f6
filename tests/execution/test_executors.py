"""Test executors with two slots: simulated ones, servers with scripted jobs, and real training."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from executor_contract import ExecutorContract
from processes import all_gone, children, processes_named
from recorded import ComputedRunner
from tiny import tiny_workload

from autotune.core.device import Device
from autotune.core.errors import DeviceError
from autotune.core.messages import Progress
from autotune.core.placement import Placement, RankDevices
from autotune.core.units import GIB
from autotune.execution import Executor, LocalExecutor, TrialJob, TrialServer


class TestSimulated(ExecutorContract):
    @pytest.fixture
    def executor(self) -> Executor:
        return ComputedRunner(lambda _: GIB // 4, slots=2)


class TestLocal(ExecutorContract):
    @pytest.fixture
    def executor(self, stand_in: None, cpu: Device, tmp_path: Path) -> Iterator[Executor]:
        workload = tiny_workload("bert-tiny")
        with TrialServer(cpu, workload, tmp_path / "one") as one, TrialServer(cpu, workload, tmp_path / "two") as two:
            yield LocalExecutor([one, two])

    def test_a_server_that_is_killed_loses_its_own_trial_alone(
        self, executor: LocalExecutor, job: Callable[[str], TrialJob]
    ) -> None:
        lost, other = "progress 1, hang", "progress 2, hang"
        executor.submit(job(lost))
        executor.submit(job(other))
        under_way: set[str] = set()
        while under_way != {lost, other}:
            under_way.add(executor.wait()[0])
        (victim,) = executor.pids_of(lost)
        (server,) = [s for s in processes_named("stand_in_server", children(os.getpid())) if victim in children(s)]
        os.kill(server, signal.SIGKILL)
        trial_id, report = executor.wait()
        while isinstance(report, Progress):
            trial_id, report = executor.wait()
        assert trial_id == lost
        assert report.reason == "lost"
        others = executor.pids_of(other)
        assert len(others) == 1
        executor.close()
        assert all_gone([victim, *others])


def test_all_servers_start_with_the_first_trial(
    stand_in: None, cpu: Device, tmp_path: Path, job: Callable[[str], TrialJob]
) -> None:
    """A trial waits for the imports of its server, in which time the others would not have begun theirs."""
    workload, started = tiny_workload("bert-tiny"), list[str]()
    with (
        TrialServer(cpu, workload, tmp_path / "one", lambda: started.append("one")) as one,
        TrialServer(cpu, workload, tmp_path / "two", lambda: started.append("two")) as two,
    ):
        executor = LocalExecutor([one, two])
        executor.submit(job("complete"))
        assert started == ["one", "two"]
        executor.close()


class TestPlacement:
    GPU = Device("cuda", 0, "GPU-a", "A", GIB, None, None, None)
    OTHER = Device("cuda", 1, "GPU-b", "A", 2 * GIB, None, None, GIB // 2)

    def test_one_gpu_is_a_placement_of_one_rank(self) -> None:
        placement = Placement.of(self.GPU)
        assert (placement.ranks, placement.label, placement.uuids) == (1, "cuda:0", ("GPU-a",))
        assert placement.rank_devices == RankDevices("cuda", ("GPU-a",))

    def test_the_rank_with_the_least_free_memory_decides(self) -> None:
        placement = Placement.of(self.GPU, self.OTHER)
        assert (placement.ranks, placement.label) == (2, "cuda:0, cuda:1")
        assert placement.least_free_bytes == GIB // 2

    def test_several_ranks_may_share_the_cpu(self, cpu: Device) -> None:
        assert Placement.of(cpu, cpu).ranks == 2
        assert Placement.of(cpu, cpu).label == "cpu"

    def test_ranks_cannot_share_a_gpu(self) -> None:
        with pytest.raises(DeviceError, match="cuda:0 are not 2 GPUs"):
            Placement.of(self.GPU, self.GPU)
