"""Test trials on nodes of a cluster: the executor over real nodes within this process, which are lost as told."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from executor_contract import ExecutorContract
from processes import wait_until
from tiny import tiny_workload

from autotune.cli.main import cli
from autotune.core.candidate import Document
from autotune.core.errors import DeviceError, InvalidRequestError, ServiceError
from autotune.core.outcome import Completed, Failed
from autotune.core.placement import Placement
from autotune.core.schema import encode
from autotune.core.training_source import find_trainer
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.devices import Device
from autotune.execution import Event, TrialJob
from autotune.execution.ray_cluster import ClusterNode, NodeLostError
from autotune.tuning.nodes import process
from autotune.tuning.nodes.node import Node, _check_files, _forget_launcher
from autotune.tuning.nodes.process import Wanted
from autotune.tuning.nodes.remote import NodeExecutor, Nodes, open_nodes, wanted_of


@dataclasses.dataclass(eq=False)
class Ticket:
    """A question that is asked when its answer is fetched."""

    question: str
    document: Document


class HereActor:
    """A node within this process. What is asked and answered goes through JSON, as between two machines."""

    def __init__(self, cluster: HereCluster, node: Node) -> None:
        self._cluster = cluster
        self._node = node
        self.is_lost = False

    def ask(self, question: str, document: Document, timeout_seconds: float) -> Document:
        if self.is_lost or question in self._cluster.loses_on:
            self._cluster.loses_on.discard(question)
            self.is_lost = True
            # A node that dies takes its processes with it.
            self._node.close()
            raise NodeLostError("the test took it away")
        answer: Document = json.loads(json.dumps(self._node.ask(question, json.loads(json.dumps(document)))))
        return self._cluster.change(question, answer)

    def begin(self, question: str, document: Document) -> Ticket:
        return Ticket(question, document)

    def finish(self, ticket: Ticket) -> Document:
        return self.ask(ticket.question, ticket.document, 0.0)

    def end(self) -> None:
        self._node.close()


class HereCluster:
    """Nodes within this process: one at a time, as many as there are."""

    address = "ray://here:1"

    def __init__(self, nodes: int = 10) -> None:
        self._left = nodes
        self.loses_on: set[str] = set()
        """Questions that the node does not live to answer, the next time."""
        self.started = 0
        self.change: Callable[[str, Document], Document] = lambda question, answer: answer

    def nodes(self) -> tuple[ClusterNode, ...]:
        return (ClusterNode("here", 0, 1, None),)

    def answered(self, tickets: Sequence[Ticket], wait_seconds: float) -> list[Ticket]:
        return list(tickets)

    def start(self, kind: type, *, gpus: int, wait_seconds: float | None, on_wait: Callable[[], None]) -> HereActor:
        if not self._left:
            raise DeviceError("no node of the Ray cluster had CPU free for 60 s", "add --wait")
        self._left -= 1
        self.started += 1
        return HereActor(self, kind())


@pytest.fixture(autouse=True)
def _stays_here() -> Iterator[None]:
    """A node changes its working directory to the search's, which is this process's here."""
    before = os.getcwd()
    yield
    os.chdir(before)


class Scene:
    """A search's side: nodes that were opened for two slots on the CPU, and what was said meanwhile."""

    def __init__(self, cluster: HereCluster, cpu: Device, folder: Path, processes: int = 1) -> None:
        self.cluster = cluster
        self.notes: list[str] = []
        self.nodes = Nodes(cluster, Wanted(0, processes), wait=False, note=self.notes.append)
        self.slots = (Placement.of(cpu), Placement.of(cpu))
        self.logs = folder / "logs"

    def executor(self) -> NodeExecutor:
        self.nodes.open("study", tiny_workload("bert-tiny"), self.slots, self.logs, wait=False)
        self.nodes.run_trials(0)
        return NodeExecutor(self.nodes, self.slots)


@pytest.fixture
def scene(stand_in: None, cpu: Device, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(HereCluster(), cpu, tmp_path)
    with made.nodes:
        yield made


class TestNodeExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self, scene: Scene) -> NodeExecutor:
        return scene.executor()

    def test_a_trial_of_a_lost_node_runs_again_on_the_next(self, scene: Scene, job: Callable[[str], TrialJob]) -> None:
        executor = scene.executor()
        executor.submit(job("progress 1, complete"))
        scene.cluster.loses_on = {"wait"}
        found = self.outcomes(executor, 1)
        assert isinstance(found["progress 1, complete"], Completed)
        assert scene.cluster.started == 2
        assert any("was lost: the test took it away; going on on another" in note for note in scene.notes)

    def test_a_node_that_is_lost_with_the_submission_is_replaced(
        self,
        scene: Scene,
        job: Callable[[str], TrialJob],
    ) -> None:
        executor = scene.executor()
        scene.cluster.loses_on = {"submit"}
        executor.submit(job("complete"))
        assert isinstance(self.outcomes(executor, 1)["complete"], Completed)

    def test_a_trial_that_loses_one_node_after_the_other_fails(
        self,
        scene: Scene,
        job: Callable[[str], TrialJob],
    ) -> None:
        executor = scene.executor()
        executor.submit(job("hang"))
        report: Any = None
        for _ in range(10):
            scene.cluster.loses_on = {"wait"}
            _, report = executor.wait()
            if not isinstance(report, Event):
                break
        assert isinstance(report, Failed)
        assert (report.reason, scene.cluster.started) == ("lost", 4)
        assert "3 nodes were lost during the trial" in report.message

    def test_without_another_node_the_search_ends_with_the_reason(
        self,
        stand_in: None,
        cpu: Device,
        tmp_path: Path,
        job: Callable[[str], TrialJob],
    ) -> None:
        scene = Scene(HereCluster(nodes=1), cpu, tmp_path)
        with scene.nodes:
            executor = scene.executor()
            executor.submit(job("hang"))
            scene.cluster.loses_on = {"wait"}
            with pytest.raises(DeviceError, match="was lost, and no other takes its place: no node of the Ray cluster"):
                executor.wait()

    def test_a_node_with_other_libraries_does_not_take_the_place(
        self,
        scene: Scene,
        job: Callable[[str], TrialJob],
    ) -> None:
        executor = scene.executor()
        executor.submit(job("complete"))
        cluster = scene.cluster

        def another_torch(question: str, reply: Document) -> Document:
            if question == "facts" and cluster.started == 2:
                reply["answer"]["packages"]["torch"] = "1.0"
            return reply

        cluster.change = another_torch
        cluster.loses_on = {"wait"}
        assert isinstance(self.outcomes(executor, 1)["complete"], Completed)
        assert cluster.started == 3
        assert any("is not equal: torch 1.0 and not" in note for note in scene.notes)

    def test_logs_come_back_with_the_outcome(self, scene: Scene, job: Callable[[str], TrialJob]) -> None:
        executor = scene.executor()
        executor.submit(dataclasses.replace(job("chatter, complete"), log_path="/elsewhere/trial-0007.log"))
        self.outcomes(executor, 1)
        log = scene.logs / "trial-0007.log"
        assert 0 < log.stat().st_size <= 256 * 1024


class TestSeveralNodes(ExecutorContract):
    """Two processes with a slot each, as ``--parallel`` has them."""

    @pytest.fixture
    def wide(self, stand_in: None, cpu: Device, tmp_path: Path) -> Iterator[Scene]:
        made = Scene(HereCluster(), cpu, tmp_path, processes=2)
        with made.nodes:
            yield made

    @pytest.fixture
    def executor(self, wide: Scene) -> NodeExecutor:
        return wide.executor()

    def test_a_lost_node_costs_its_own_trial_alone(self, wide: Scene, job: Callable[[str], TrialJob]) -> None:
        executor = wide.executor()
        assert wide.cluster.started == 2
        for name in ("complete", "progress 1, complete"):
            executor.submit(job(name))
        wide.cluster.loses_on = {"wait"}
        found = self.outcomes(executor, 2)
        assert all(isinstance(outcome, Completed) for outcome in found.values())
        assert wide.cluster.started == 3
        assert sum("was lost" in note for note in wide.notes) == 1

    def test_nodes_that_are_not_equal_are_refused(self) -> None:
        cluster = HereCluster()

        def another_torch(question: str, reply: Document) -> Document:
            if question == "facts" and cluster.started == 2:
                reply["answer"]["packages"]["torch"] = "1.0"
            return reply

        cluster.change = another_torch
        with pytest.raises(DeviceError, match=r"is not equal to .*: torch 1\.0 and not"):
            Nodes(cluster, Wanted(0, 2), wait=False, note=print).__enter__()


class TestVersions:
    def test_another_version_is_told_with_both(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "__version__", "9.9")
        nodes = Nodes(HereCluster(), Wanted(0), wait=False, note=print)
        with pytest.raises(ServiceError, match=r"has autotune .*, and here is 9\.9"), nodes:
            pass

    def test_another_code_of_the_same_version_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "this_code", lambda: "another")
        nodes = Nodes(HereCluster(), Wanted(0), wait=False, note=print)
        with pytest.raises(ServiceError, match="is not the one that is here"), nodes:
            pass

    def test_a_node_that_says_what_nobody_knows_is_of_another_version(self) -> None:
        cluster = HereCluster()
        cluster.change = lambda question, reply: {**reply, "answer": {**reply["answer"], "news": 1}}
        nodes = Nodes(cluster, Wanted(0), wait=False, note=print)
        with pytest.raises(ServiceError, match="is of another version"), nodes:
            pass


class TestGpus:
    """A node whose driver shows these GPUs."""

    def nodes(self, shown: int, wanted: int) -> Nodes:
        cluster = HereCluster()

        def with_gpus(question: str, reply: Document) -> Document:
            if question == "facts":
                gpus = [
                    encode(Device("cuda", number, f"GPU-{number}", "H200", GIB, 0, 0, GIB)) for number in range(shown)
                ]
                facts = reply["answer"]
                facts |= {"devices": [*gpus, *facts["devices"]], "gpu_problem": "no driver"}
            return reply

        cluster.change = with_gpus
        return Nodes(cluster, Wanted(wanted), wait=False, note=print)

    def test_a_search_has_those_that_ray_gave(self) -> None:
        with self.nodes(2, 2) as nodes:
            assert [device.uuid for device in nodes.devices] == ["GPU-0", "GPU-1"]

    def test_a_node_whose_driver_shows_fewer_is_refused(self) -> None:
        with pytest.raises(DeviceError, match=r"offers 2 GPUs to Ray, and its driver shows fewer\. no driver"):
            self.nodes(1, 2).__enter__()

    def test_a_node_where_ray_hides_no_gpu_is_refused(self) -> None:
        with pytest.raises(DeviceError, match=r"Ray gave 1 GPU of the node .*, and all 8 are visible there.*NOSET"):
            self.nodes(8, 1).__enter__()


def test_a_stock_run_at_the_end_is_refused_since_it_trains_here() -> None:
    with (
        pytest.raises(InvalidRequestError, match="--verify trains on this machine, and --executor searches on another"),
        open_nodes("ray://head:10001", {}, wait=False, verifies=True, note=print),
    ):
        pass


def test_a_service_and_a_cluster_are_two_places() -> None:
    words = ["search", "--model", "bert-tiny", "--server", "http://here:1", "--executor", "ray://auto"]
    with pytest.raises(InvalidRequestError, match="--server and --executor are two places"):
        cli.main(words, standalone_mode=False)


class TestFiles:
    """What the search names must be on the node as well, and be the same."""

    def workload(self, file: Path) -> Workload:
        file.write_text("def build(overrides): ...")
        return Workload.of_source(find_trainer(str(file)))

    def test_code_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        workload = self.workload(tmp_path / "train.py")
        (tmp_path / "train.py").unlink()
        with pytest.raises(InvalidRequestError, match=r"train\.py is not on the node .*same path on every node"):
            _check_files(workload)

    def test_code_that_differs_is_named(self, tmp_path: Path) -> None:
        workload = self.workload(tmp_path / "train.py")
        _check_files(workload)
        (tmp_path / "train.py").write_text("def build(overrides): return None")
        with pytest.raises(InvalidRequestError, match=r"train\.py differs on the node"):
            _check_files(workload)


class TestLauncher:
    """What Ray did to a process is undone, and what the user set is kept."""

    @contextlib.contextmanager
    def raylet(self, **variables: str) -> Iterator[str]:
        """A process with these variables, which stands for the raylet; its id."""
        process = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **variables})
        try:
            # The kernel shows the variables a moment after the program has begun.
            assert wait_until(lambda: b"PATH=" in Path(f"/proc/{process.pid}/environ").read_bytes())
            yield str(process.pid)
        finally:
            process.kill()
            process.wait()

    def test_threads_that_ray_set_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with self.raylet() as pid:
            monkeypatch.setenv("RAY_RAYLET_PID", pid)
            monkeypatch.setattr("sys.path", ["/x/ray/thirdparty_files", "/x/ray/_private/workers", "/x"])
            _forget_launcher()
        assert "OMP_NUM_THREADS" not in os.environ
        assert sys.path == ["/x"]

    def test_threads_that_the_user_set_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        with self.raylet(OMP_NUM_THREADS="3") as pid:
            monkeypatch.setenv("RAY_RAYLET_PID", pid)
            _forget_launcher()
        assert os.environ["OMP_NUM_THREADS"] == "3"


def test_folders_of_nodes_that_were_killed_are_removed(scene: Scene, tmp_path: Path) -> None:
    abandoned = Path(tempfile.gettempdir()) / "autotune-node-999999999-x"
    abandoned.mkdir(exist_ok=True)
    scene.executor()
    assert not abandoned.exists()


class TestWanted:
    CPUS = (ClusterNode("a", 0, 8, None), ClusterNode("b", 0, 4, None))
    GPUS = (ClusterNode("a", 4, 8, "H200"), ClusterNode("b", 1, 4, None))

    @pytest.mark.parametrize(
        ("options", "nodes", "gpus"),
        [
            ({}, CPUS, 0),
            ({}, GPUS, 1),
            ({"device": "cpu"}, GPUS, 0),
            ({"device": "cuda"}, GPUS, 1),
            ({"gpus": "2"}, GPUS, 2),
            ({"gpus": "all"}, GPUS, 4),
        ],
    )
    def test_options_say_how_many_gpus(
        self, options: dict[str, str], nodes: tuple[ClusterNode, ...], gpus: int
    ) -> None:
        assert wanted_of(options, nodes) == Wanted(gpus)

    def test_trials_beside_each_other_take_the_gpus_of_all_nodes_of_a_kind(self) -> None:
        nodes = (*self.GPUS, ClusterNode("c", 2, 8, "H200"))
        assert wanted_of({"gpus": "all", "parallel": True}, nodes) == Wanted(1, 6)
        assert wanted_of({"gpus": "3", "parallel": True}, nodes) == Wanted(1, 3)
        with pytest.raises(DeviceError, match=r"--gpus 7: the Ray cluster has a \(4 H200\), .*use --gpus 6 or fewer"):
            wanted_of({"gpus": "7", "parallel": True}, nodes)

    def test_what_no_node_has_is_told_with_what_the_cluster_has(self) -> None:
        with pytest.raises(DeviceError, match=r"no node .* has 1 GPU; it has a \(no GPU, 8 cores\), b \(no GPU, 4 co"):
            wanted_of({"device": "cuda"}, self.CPUS)
        with pytest.raises(DeviceError, match=r"has 5 GPUs; it has a \(4 H200\), b \(1 GPU\)"):
            wanted_of({"gpus": "5"}, self.GPUS)

    @pytest.mark.parametrize("options", [{"device": "cuda:1"}, {"gpus": "0,1"}, {"gpus": "0"}])
    def test_which_gpu_is_not_asked_for(self, options: dict[str, str]) -> None:
        with pytest.raises(InvalidRequestError, match="Ray chooses the GPU"):
            wanted_of(options, self.GPUS)
