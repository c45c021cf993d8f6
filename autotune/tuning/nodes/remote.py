"""Run a search's trials, inspection and predictions in processes on nodes of a cluster."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from autotune.core.candidate import Arm, Document
from autotune.core.errors import DeviceError, InvalidRequestError
from autotune.core.inspection import Inspection, Software
from autotune.core.messages import Answer
from autotune.core.outcome import Failed, Outcome, outcome_from_document
from autotune.core.placement import Placement
from autotune.core.prediction import ArmsToTrace, PredictionWork
from autotune.core.schema import decode, encode
from autotune.core.units import plural
from autotune.core.workload import Workload
from autotune.devices import Device
from autotune.execution import Event, TrialJob
from autotune.execution.ray_cluster import ClusterNode, NodeLostError, RayCluster
from autotune.tuning.environment import kind_fingerprint
from autotune.tuning.nodes.messages import NodeReport
from autotune.tuning.nodes.process import (
    ANSWER_SECONDS,
    END_SECONDS,
    MOST_ATTEMPTS,
    START_SECONDS,
    Cluster,
    NodeProcess,
    Note,
    Wanted,
    difference_of,
)

if TYPE_CHECKING:
    from autotune.tuning.request import SearchRequest


def wanted_of(options: Mapping[str, Any], nodes: Sequence[ClusterNode]) -> Wanted:
    """Return what the options ask of a node; raises ``DeviceError`` where no node of the cluster has it."""
    device, gpus = options.get("device"), options.get("gpus")
    if device not in (None, "cpu", "cuda"):
        raise InvalidRequestError(
            f"--device {device}: Ray chooses the GPU of a cluster", "use --device cuda or cpu, or --gpus N"
        )
    if device is not None and gpus is not None:
        raise InvalidRequestError(
            f"--device {device} is one device, and --gpus {gpus} names others", "give one of the two"
        )
    if gpus is not None and gpus != "all" and not (gpus.isascii() and gpus.isdigit() and int(gpus)):
        raise InvalidRequestError(f"--gpus {gpus}: Ray chooses the GPUs of a cluster", "write how many: --gpus 2")
    most = max((node.gpus for node in nodes), default=0)
    if options.get("parallel"):
        if gpus is None:
            raise InvalidRequestError("--parallel runs trials on several GPUs, and none are named", "add --gpus all")
        # Those of one kind, since the trials of a study are compared.
        alike = sum(node.gpus for node in nodes if node.gpu_name == nodes[0].gpu_name)
        count = alike if gpus == "all" else int(gpus)
        if alike < max(1, count):
            raise DeviceError(f"--gpus {gpus}: the Ray cluster has {_in_words(nodes)}", f"use --gpus {alike} or fewer")
        return Wanted(1, count)
    if device == "cpu" or (device is None and gpus is None and most == 0):
        return Wanted(0)
    count = 1 if gpus is None else most if gpus == "all" else int(gpus)
    if most < max(1, count):
        asked = f"--gpus {gpus}" if gpus is not None else f"--device {device}"
        raise DeviceError(
            f"{asked}: no node of the Ray cluster has {plural(max(1, count), 'GPU')}; it has {_in_words(nodes)}",
            "ask for what one node has, or add a node",
        )
    return Wanted(count)


def _in_words(nodes: Sequence[ClusterNode]) -> str:
    return ", ".join(node.describe() for node in nodes) or "no node"


class Nodes:
    """A context manager: the processes on nodes that a search runs on. Questions go to the first of them."""

    def __init__(self, cluster: Cluster, wanted: Wanted, *, wait: bool, note: Note) -> None:
        self.cluster = cluster
        self.note = note
        """Is called with notes for the user."""
        self._stack = contextlib.ExitStack()
        self._wanted = wanted
        self.processes = tuple(
            NodeProcess(cluster, wanted, number, wait=wait, note=lambda text: self.note(text))
            for number in range(wanted.processes)
        )

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for process in self.processes:
                stack.enter_context(process)
                difference = difference_of(self.processes[0].facts, process.facts, self._wanted)
                if difference is not None:
                    raise DeviceError(
                        f"the node {process.host} is not equal to {self.processes[0].host}: {difference}",
                        "ask for as many GPUs as there are on equal nodes",
                    )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that a search uses: of one process those of each rank, of several one each."""
        return tuple(device for process in self.processes for device in process.devices)

    @property
    def first(self) -> NodeProcess:
        """The process that questions go to."""
        return self.processes[0]

    def open(self, study: str, workload: Workload, slots: Sequence[Placement], logs: Path, *, wait: bool) -> None:
        """Have the nodes take their devices for a search, whose logs are kept in ``logs`` here."""
        for number, process in enumerate(self.processes):
            process.open(study, workload, slots[number :: len(self.processes)], logs, wait=wait)

    def places(self, slots: Sequence[Placement]) -> list[tuple[NodeProcess, int]]:
        """Return where each slot is: a process, and the number that the slot has there."""
        count = len(self.processes)
        return [(self.processes[number % count], number // count) for number in range(len(slots))]

    def read_data(self) -> Workload:
        """Have the nodes read the dataset; return the workload with its facts."""
        read = [process.read_data() for process in self.processes]
        return read[0]

    def run_as_inspected(self, workload: Workload) -> None:
        """Hand trials the workload as its inspection has shown it."""
        for process in self.processes:
            process.run_as_inspected(workload)

    def run_trials(self, context_bytes: int) -> None:
        """Have the nodes take trials."""
        for process in self.processes:
            process.run_trials(context_bytes)

    # A machine, see autotune.tuning.machine.Machine

    def environment(
        self, request: SearchRequest, arms: Sequence[Arm], software: Software, measurement_revision: int
    ) -> Document:
        """See ``Machine.environment``. Raises ``DeviceError`` where the nodes differ."""
        asked = {
            "workload": request.workload.document(),
            "arms": [encode(arm) for arm in arms],
            "software": encode(software),
            "measurement_revision": measurement_revision,
        }
        found = [process.environment(asked) for process in self.processes]
        for process, environment in zip(self.processes, found, strict=True):
            if kind_fingerprint(environment) != kind_fingerprint(found[0]):
                raise DeviceError(
                    f"the nodes {self.first.host} and {process.host} are not equal: trials on them do not compare",
                    "ask for as many GPUs as there are on equal nodes",
                )
        return found[0]

    def inspection_key(self, request: SearchRequest) -> str | None:
        """See ``Machine.inspection_key``."""
        key: str | None = self.first.ask("inspection_key", workload=request.workload.document())
        return key

    def prediction_key(self, identity: PredictionWork, workload: Workload) -> str:
        """See ``Machine.prediction_key``."""
        return str(self.first.ask("prediction_key", identity=encode(identity), workload=workload.document()))

    def free_host_bytes(self) -> int | None:
        """See ``Machine.free_host_bytes``."""
        found: int | None = self.first.ask("free_host_bytes")
        return found


class NodeServer:
    """The trial servers of nodes, as the search sees them; see ``autotune.execution.TrialServer``."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._predicting: dict[str, int] = {}
        """Predictions under way, with the number of nodes that were lost before."""

    def start(self, *, inspects: bool = False) -> None:
        """Have the server start; its imports overlap with whatever the caller does next."""
        for process in self._nodes.processes:
            process.ask("start", START_SECONDS, inspects=inspects and process is self._nodes.first)

    def read_data(self, folder: Path) -> Workload:
        """Have the node read the data into a folder of its own; return the workload with its facts."""
        return self._nodes.read_data()

    def discard_data(self) -> None:
        """Do nothing: a node removes its data at the end."""

    def inspect(self, timeout_seconds: float | None = None, arms: ArmsToTrace | None = None) -> Inspection:
        """Return what the node finds out about itself and the workload."""
        limit = START_SECONDS + 2 * (timeout_seconds or START_SECONDS)
        told = None if arms is None else encode(arms)
        return decode(self._nodes.first.ask("inspect", limit, timeout_seconds=timeout_seconds, arms=told), Inspection)

    def run_as_inspected(self, workload: Workload) -> None:
        """Hand trials the workload as its inspection has shown it."""
        self._nodes.run_as_inspected(workload)

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start a prediction beside the trials."""
        self._nodes.first.ask(
            "predict", START_SECONDS, job_id=job_id, work=encode(work), timeout_seconds=timeout_seconds
        )
        self._predicting[job_id] = self._nodes.first.losses

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return the predictions that have ended since the last call; those of a lost node are lost."""
        found: Document = {}
        if self._predicting:
            found = self._nodes.first.ask("predicted", ANSWER_SECONDS + wait_seconds, wait_seconds=wait_seconds)
        ended = {job_id: decode(answer, Answer) for job_id, answer in found.items()}
        for job_id, losses in self._predicting.items():
            if job_id not in ended and losses < self._nodes.first.losses:
                ended[job_id] = Answer(lost=True)
        for job_id in ended:
            self._predicting.pop(job_id, None)
        return ended


@dataclass
class _Running:
    """A trial under way."""

    job: TrialJob
    slot: int
    process: NodeProcess
    place: int
    """The number that the slot has on the node."""
    attempts: int = 1


class NodeExecutor:
    """Runs trials on nodes. Those under way on a node that is lost run again on the next, a few times at most."""

    def __init__(self, nodes: Nodes, slots: Sequence[Placement]) -> None:
        self._cluster = nodes.cluster
        self._slots = tuple(slots)
        self._places = nodes.places(slots)
        self._running: dict[str, _Running] = {}
        self._reports: deque[tuple[str, Event | Outcome]] = deque()

    @property
    def slots(self) -> tuple[Placement, ...]:
        """See ``Executor.slots``."""
        return self._slots

    def submit(self, job: TrialJob) -> str:
        """See ``Executor.submit``."""
        busy = {running.slot for running in self._running.values()}
        free = [
            number
            for number, placement in enumerate(self._slots)
            if number not in busy and job.placement in (None, placement)
        ]
        if not free:
            raise RuntimeError("a trial was submitted although no slot for it is free")
        process, place = self._places[free[0]]
        self._running[job.trial_id] = running = _Running(job, free[0], process, place)
        try:
            self._give(running)
        except NodeLostError as loss:
            self._go_on(process, loss)
        return job.trial_id

    @staticmethod
    def _give(running: _Running) -> None:
        job = encode(replace(running.job, placement=None))
        running.process.ask_once("submit", START_SECONDS, job=job, slot=running.place)

    def wait(self) -> tuple[str, Event | Outcome]:
        """See ``Executor.wait``."""
        while not self._reports:
            if not self._running:
                raise RuntimeError("no trial is under way")
            self._listen()
        return self._reports.popleft()

    def _listen(self) -> None:
        """Take in what the nodes say, waiting for some of it."""
        busy = dict.fromkeys(running.process for running in self._running.values())
        asked = []
        for process in busy:
            try:
                asked.append((process, process.begin_wait()))
            except NodeLostError as loss:
                self._go_on(process, loss)
        answered = self._cluster.answered([ticket for _, ticket in asked], ANSWER_SECONDS)
        for process, ticket in asked:
            if ticket in answered:
                try:
                    self._take(process.finish_wait())
                except NodeLostError as loss:
                    self._go_on(process, loss)

    def _take(self, documents: Sequence[Document]) -> None:
        for document in documents:
            report = decode(document, NodeReport)
            if report.trial_id not in self._running:
                continue
            if report.outcome is None:
                assert report.progress is not None
                self._reports.append((report.trial_id, Event(report.progress)))
            else:
                del self._running[report.trial_id]
                self._reports.append((report.trial_id, outcome_from_document(report.outcome)))

    def _go_on(self, process: NodeProcess, loss: NodeLostError) -> None:
        """Run the trials that were under way there again on another node, but those that lost too many."""
        while True:
            lost = {key: running for key, running in self._running.items() if running.process is process}
            for trial_id, running in lost.items():
                running.attempts += 1
                if running.attempts > MOST_ATTEMPTS:
                    del self._running[trial_id]
                    message = f"{MOST_ATTEMPTS} nodes were lost during the trial, the last one: {loss}"
                    self._reports.append((trial_id, Failed("lost", message)))
            process.replace(loss)
            try:
                for running in lost.values():
                    if running.attempts <= MOST_ATTEMPTS:
                        self._give(running)
                return
            except NodeLostError as again:
                loss = again

    def close(self) -> None:
        """See ``Executor.close``."""
        for process in dict.fromkeys(running.process for running in self._running.values()):
            process.forget_wait()
            with contextlib.suppress(NodeLostError):
                process.ask_once("stop", END_SECONDS)
        self._running.clear()
        self._reports.clear()


@contextlib.contextmanager
def open_nodes(
    address: str, options: Mapping[str, Any], *, wait: bool, note: Note, verifies: bool = False
) -> Iterator[Nodes]:
    """Connect to a Ray cluster and start a process on a node that has what the options ask for."""
    if verifies:
        raise InvalidRequestError(
            "--verify trains on this machine, and --executor searches on another",
            "leave --verify out, and run autotune verify on a machine like those of the cluster",
        )
    with RayCluster(address) as cluster:
        wanted = wanted_of(options, cluster.nodes())
        with Nodes(cluster, wanted, wait=wait, note=note) as nodes:
            yield nodes
