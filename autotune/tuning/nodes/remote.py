"""Search on a node of a cluster from here: ask the node, run trials there, and go on on another where it is lost."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from autotune import __version__
from autotune.core.candidate import Arm, Document
from autotune.core.errors import (
    AutotuneError,
    DeviceError,
    InvalidRequestError,
    ServiceError,
    error_with_code,
)
from autotune.core.inspection import Inspection, Software
from autotune.core.messages import Answer
from autotune.core.outcome import Failed, Outcome, outcome_from_document
from autotune.core.placement import Placement
from autotune.core.prediction import ArmsToTrace, PredictionWork
from autotune.core.schema import decode, encode
from autotune.core.units import format_bytes, plural
from autotune.core.workload import Workload
from autotune.devices import Device
from autotune.execution import Event, TrialJob
from autotune.execution.ray_cluster import ClusterNode, NodeLostError, RayCluster
from autotune.tuning.environment import environment_fingerprint
from autotune.tuning.nodes.messages import NodeFacts, NodeReport, Opened, Opening, Reply
from autotune.tuning.nodes.node import Node, this_code

# A node that is lost once may have had a fault; trials that lose three nodes are the fault.
_MOST_ATTEMPTS = 3
# How long a node may take to answer: to most questions at once; others start a server, which may take minutes, or wait
# for memory of a GPU. A node that is not heard of for longer is lost.
_ANSWER_SECONDS = 60.0
_START_SECONDS = 600.0
_END_SECONDS = 20.0
_READ_SECONDS = 2 * 3600.0
_WAIT_SECONDS = 1.0
# Without --wait. Clusters that start nodes on demand take longer.
_FREE_SECONDS = 60.0

T = TypeVar("T")
Note = Callable[[str], None]


class Actor(Protocol):
    """A process on a node that answers one question at a time."""

    def ask(self, question: str, document: Document, timeout_seconds: float) -> Document:
        """Return the answer; raises ``NodeLostError`` where none comes in time."""

    def end(self) -> None:
        """End the process at once."""


class Cluster(Protocol):
    """Starts processes on nodes."""

    address: str

    def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the nodes, those with the most GPUs first."""

    def start(self, kind: type, *, gpus: int, wait_seconds: float | None, on_wait: Callable[[], None]) -> Actor:
        """Start an object of a class on a node with so many free GPUs."""


@dataclass(frozen=True)
class Wanted:
    """What a search needs of a node."""

    gpus: int
    """0 for the CPU."""


def wanted_of(options: Mapping[str, Any], nodes: Sequence[ClusterNode]) -> Wanted:
    """Return what the options ask of a node; raises ``DeviceError`` where no node of the cluster has it."""
    device, gpus = options.get("device"), options.get("gpus")
    if device not in (None, "cpu", "cuda"):
        raise InvalidRequestError(
            f"--device {device}: Ray chooses the GPU of a cluster", "use --device cuda or cpu, or --gpus N"
        )
    if device is not None and gpus is not None:
        raise InvalidRequestError(f"--device {device} is one device, and --gpus {gpus} names others", "give one option")
    if gpus is not None and gpus != "all" and not (gpus.isascii() and gpus.isdigit() and int(gpus)):
        raise InvalidRequestError(f"--gpus {gpus}: Ray chooses the GPUs of a cluster", "write how many: --gpus 2")
    most = max((node.gpus for node in nodes), default=0)
    if device == "cpu" or (device is None and gpus is None and most == 0):
        return Wanted(0)
    count = 1 if gpus is None else most if gpus == "all" else int(gpus)
    if most < max(1, count):
        asked = f"--gpus {gpus}" if gpus is not None else f"--device {device}"
        has = ", ".join(node.describe() for node in nodes)
        raise DeviceError(
            f"{asked}: no node of the Ray cluster has {plural(max(1, count), 'GPU')}; it has {has or 'no node'}",
            "ask for what one node has, or add a node",
        )
    return Wanted(count)


class Nodes:
    """A context manager: the node that a search runs on. Where it is lost, another that is equal takes its place."""

    def __init__(self, cluster: Cluster, wanted: Wanted, *, wait: bool, note: Note) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._wait = wait
        self.note = note
        """Is called with notes for the user."""
        self._actor: Actor | None = None
        self._facts: NodeFacts | None = None
        self._losses = 0
        # What a node that takes the place of another is told anew.
        self._opening: Opening | None = None
        self._here: Path | None = None
        self._there = ""
        self._has_read_data = False
        self._inspected: Workload | None = None
        self._context_bytes: int | None = None
        self._described: tuple[Document, str] | None = None

    def __enter__(self) -> Nodes:
        self._actor, self._facts = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            # Asked to end, it removes its files, too.
            with contextlib.suppress(NodeLostError, AutotuneError):
                actor.ask("close", {}, _END_SECONDS)
            actor.end()

    @property
    def host(self) -> str:
        """The node's name."""
        return self._facts.host if self._facts is not None else ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the node that a search uses: as many GPUs as were asked for, or the CPU."""
        assert self._facts is not None
        return _chosen(self._facts, self._wanted)

    @property
    def losses(self) -> int:
        """How many nodes were lost so far."""
        return self._losses

    def _start(self) -> tuple[Actor, NodeFacts]:
        """Start a process on a node that fits; return it with what it says of the node."""
        gpus = self._wanted.gpus

        def on_wait() -> None:
            self.note(f"waiting for {plural(gpus, 'free GPU') if gpus else 'a free core'} of the Ray cluster …")

        seconds = None if self._wait else _FREE_SECONDS
        actor = self._cluster.start(Node, gpus=gpus, wait_seconds=seconds, on_wait=on_wait)
        try:
            facts = _facts_of(self._read(actor.ask("facts", {}, _ANSWER_SECONDS)))
            shown = sum(device.kind == "cuda" for device in facts.devices)
            if 0 < gpus < shown:
                raise DeviceError(
                    f"Ray gave {plural(gpus, 'GPU')} of the node {facts.host}, and all {shown} are visible there",
                    "have Ray set CUDA_VISIBLE_DEVICES: unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES there",
                )
            if shown < gpus:
                raise DeviceError(
                    f"the node {facts.host} offers {plural(gpus, 'GPU')} to Ray, and its driver shows fewer",
                    facts.gpu_problem or "see nvidia-smi there",
                )
        except NodeLostError as error:
            actor.end()
            raise DeviceError(f"a node of the Ray cluster was lost at once: {error}", "see ray status") from error
        except BaseException:
            actor.end()
            raise
        return actor, facts

    # Questions

    def ask(self, question: str, within_seconds: float = _ANSWER_SECONDS, **document: Any) -> Any:
        """Return the answer of the node, or of the one that takes its place."""
        while True:
            try:
                return self.ask_once(question, within_seconds, **document)
            except NodeLostError as error:
                self.replace(error)

    def ask_once(self, question: str, within_seconds: float = _ANSWER_SECONDS, **document: Any) -> Any:
        """Return the answer of the node; raises ``NodeLostError``."""
        if self._actor is None:
            raise NodeLostError("it has ended")
        return self._read(self._actor.ask(question, document, within_seconds))

    def _read(self, document: Document) -> Any:
        """Return what a reply says; hand on its notes and logs, and raise the error that it tells of."""
        reply = decode(document, Reply)
        for note in reply.notes:
            self.note(self._as_here(note))
        for name, text in (reply.logs or {}).items():
            self._keep_log(name, text)
        if reply.problem is not None:
            problem = reply.problem
            message, hint = self._as_here(problem.message), self._as_here(problem.hint)
            raise error_with_code(problem.exit_code, message, hint) or AutotuneError(message, hint)
        return reply.answer

    def _as_here(self, text: str) -> str:
        """Return a text of the node with the names that its logs have here."""
        return text.replace(self._there, str(self._here)) if self._there and self._here is not None else text

    def _keep_log(self, name: str, text: str) -> None:
        if self._here is None or ".." in Path(name).parts or Path(name).is_absolute():
            return
        path = self._here / name
        # A search goes on where a log cannot be written.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="replace")

    # The search

    def open(self, study: str, workload: Workload, slots: Sequence[Placement], logs: Path, *, wait: bool) -> None:
        """Have the node take its devices for a search, whose logs are kept in ``logs`` here."""
        self._here = logs
        ranks = tuple(len(slot.devices) for slot in slots)
        self._opening = Opening(study, workload.document(), self._uuids(ranks), os.getcwd(), wait)
        self._open_again()

    def _uuids(self, ranks: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Return the devices of each slot; on a CPU all ranks share it."""
        left = deque(device.uuid for device in self.devices)
        if self._wanted.gpus == 0:
            return tuple((left[0],) * count for count in ranks)
        return tuple(tuple(left.popleft() for _ in range(count)) for count in ranks)

    def _open_again(self) -> None:
        assert self._opening is not None
        limit = _READ_SECONDS if self._opening.wait else _START_SECONDS
        self._there = decode(self.ask_once("open", limit, opening=encode(self._opening)), Opened).folder
        if self._has_read_data:
            self.ask_once("read_data", _READ_SECONDS)
        if self._inspected is not None:
            self.ask_once("run_as_inspected", workload=self._inspected.document())
        if self._context_bytes is not None:
            self.ask_once("run_trials", context_bytes=self._context_bytes)

    def replace(self, loss: NodeLostError) -> None:
        """Go on on another node that is equal; raises ``DeviceError`` where there is none."""
        lost = self.host
        assert self._facts is not None
        before = self._facts
        self._there = ""
        unlike: list[Actor] = []
        try:
            while True:
                actor, self._actor = self._actor, None
                if actor is not None:
                    actor.end()
                self._losses += 1
                if self._losses >= 2 * _MOST_ATTEMPTS:
                    raise DeviceError(f"{self._losses} nodes of the Ray cluster were lost", "see ray status") from loss
                self.note(f"the node {lost} was lost: {loss}; going on on another")
                try:
                    actor, facts = self._start()
                except DeviceError as error:
                    raise DeviceError(
                        f"the node {lost} was lost, and no other takes its place: {error.message}", error.hint
                    ) from loss
                difference = _difference(before, facts, self._wanted)
                if difference is not None:
                    # It stays until an equal one is found, so that Ray does not offer it again.
                    unlike.append(actor)
                    self.note(f"the node {facts.host} is not equal: {difference}")
                    self._losses -= 1
                    continue
                self._actor, self._facts = actor, facts
                try:
                    if self._opening is not None:
                        ranks = tuple(len(uuids) for uuids in self._opening.slots)
                        self._opening = replace(self._opening, slots=self._uuids(ranks))
                        self._open_again()
                        self._check_environment()
                    return
                except NodeLostError as again:
                    loss, lost = again, facts.host
        finally:
            for actor in unlike:
                actor.end()

    def _check_environment(self) -> None:
        """Raise ``DeviceError`` where measurements on this node cannot be compared with those before."""
        if self._described is None:
            return
        asked, fingerprint = self._described
        if environment_fingerprint(self.ask_once("environment", **asked)) != fingerprint:
            raise DeviceError(
                f"the node {self.host} that took the place of a lost one measures in another environment",
                "make the nodes equal, or search anew under another --study",
            )

    # A machine, see autotune.tuning.machine.Machine

    def environment(self, request: Any, arms: Sequence[Arm], software: Software, measurement_revision: int) -> Document:
        """See ``Machine.environment``."""
        asked = {
            "workload": request.workload.document(),
            "arms": [encode(arm) for arm in arms],
            "software": encode(software),
            "measurement_revision": measurement_revision,
        }
        found: Document = self.ask("environment", **asked)
        self._described = asked, environment_fingerprint(found)
        return found

    def inspection_key(self, request: Any) -> str | None:
        """See ``Machine.inspection_key``."""
        key: str | None = self.ask("inspection_key", workload=request.workload.document())
        return key

    def prediction_key(self, identity: PredictionWork, workload: Workload) -> str:
        """See ``Machine.prediction_key``."""
        return str(self.ask("prediction_key", identity=encode(identity), workload=workload.document()))

    def free_host_bytes(self) -> int | None:
        """See ``Machine.free_host_bytes``."""
        found: int | None = self.ask("free_host_bytes")
        return found

    # What is remembered for the next node

    def read_data(self) -> Workload:
        """Have the node read the dataset; return the workload with its facts."""
        workload = Workload.from_document(self.ask("read_data", _READ_SECONDS))
        self._has_read_data = True
        return workload

    def run_as_inspected(self, workload: Workload) -> None:
        """Hand trials the workload as its inspection has shown it."""
        self._inspected = workload
        self.ask("run_as_inspected", workload=workload.document())

    def run_trials(self, context_bytes: int) -> None:
        """Have the node take trials."""
        self._context_bytes = context_bytes
        self.ask("run_trials", context_bytes=context_bytes)


class NodeServer:
    """The trial server of a node, as the search sees it; see ``autotune.execution.TrialServer``."""

    def __init__(self, nodes: Nodes, workload: Workload) -> None:
        self._nodes = nodes
        self.workload = workload
        self._predicting: dict[str, int] = {}
        """Predictions under way, with the number of nodes that were lost before."""

    def start(self, *, inspects: bool = False) -> None:
        """Have the server start; its imports overlap with whatever the caller does next."""
        self._nodes.ask("start", _START_SECONDS, inspects=inspects)

    def read_data(self, folder: Path) -> Workload:
        """Have the node read the data into a folder of its own; return the workload with its facts."""
        self.workload = self._nodes.read_data()
        return self.workload

    def discard_data(self) -> None:
        """Do nothing: a node removes its data at the end."""

    def inspect(self, timeout_seconds: float | None = None, arms: ArmsToTrace | None = None) -> Inspection:
        """Return what the node finds out about itself and the workload."""
        limit = _START_SECONDS + 2 * (timeout_seconds or _START_SECONDS)
        told = None if arms is None else encode(arms)
        return decode(self._nodes.ask("inspect", limit, timeout_seconds=timeout_seconds, arms=told), Inspection)

    def run_as_inspected(self, workload: Workload) -> None:
        """Hand trials the workload as its inspection has shown it."""
        self.workload = workload
        self._nodes.run_as_inspected(workload)

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start a prediction beside the trials."""
        self._nodes.ask("predict", _START_SECONDS, job_id=job_id, work=encode(work), timeout_seconds=timeout_seconds)
        self._predicting[job_id] = self._nodes.losses

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return the predictions that have ended since the last call; those of a lost node are lost."""
        found: Document = {}
        if self._predicting:
            found = self._nodes.ask("predicted", _ANSWER_SECONDS + wait_seconds, wait_seconds=wait_seconds)
        ended = {job_id: decode(answer, Answer) for job_id, answer in found.items()}
        for job_id, losses in self._predicting.items():
            if job_id not in ended and losses < self._nodes.losses:
                ended[job_id] = Answer(lost=True)
        for job_id in ended:
            self._predicting.pop(job_id, None)
        return ended


@dataclass
class _Running:
    """A trial under way."""

    job: TrialJob
    slot: int
    attempts: int = 1


class NodeExecutor:
    """Runs trials on a node. Those under way on a node that is lost run again on the next, a few times at most."""

    def __init__(self, nodes: Nodes, slots: Sequence[Placement]) -> None:
        self._nodes = nodes
        self._slots = tuple(slots)
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
        self._running[job.trial_id] = running = _Running(job, free[0])
        try:
            self._give(running)
        except NodeLostError as loss:
            self._go_on(loss)
        return job.trial_id

    def _give(self, running: _Running) -> None:
        job = encode(replace(running.job, placement=None))
        self._nodes.ask_once("submit", _START_SECONDS, job=job, slot=running.slot)

    def wait(self) -> tuple[str, Event | Outcome]:
        """See ``Executor.wait``."""
        while not self._reports:
            if not self._running:
                raise RuntimeError("no trial is under way")
            try:
                self._take(self._nodes.ask_once("wait", _ANSWER_SECONDS, seconds=_WAIT_SECONDS))
            except NodeLostError as loss:
                self._go_on(loss)
        return self._reports.popleft()

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

    def _go_on(self, loss: NodeLostError) -> None:
        """Run the trials that were under way again on another node, but those that lost too many."""
        while True:
            for trial_id, running in list(self._running.items()):
                running.attempts += 1
                if running.attempts > _MOST_ATTEMPTS:
                    del self._running[trial_id]
                    message = f"{_MOST_ATTEMPTS} nodes were lost during the trial, the last one: {loss}"
                    self._reports.append((trial_id, Failed("lost", message)))
            self._nodes.replace(loss)
            try:
                for running in self._running.values():
                    self._give(running)
                return
            except NodeLostError as again:
                loss = again

    def close(self) -> None:
        """See ``Executor.close``."""
        if self._running:
            with contextlib.suppress(NodeLostError):
                self._nodes.ask_once("stop", _END_SECONDS)
        self._running.clear()
        self._reports.clear()


def _chosen(facts: NodeFacts, wanted: Wanted) -> tuple[Device, ...]:
    kind = "cuda" if wanted.gpus else "cpu"
    return tuple(device for device in facts.devices if device.kind == kind)[: max(1, wanted.gpus)]


def _facts_of(document: Document) -> NodeFacts:
    """Return what a node says of itself; raises ``ServiceError`` where its autotune is another one."""
    hint = "install the same autotune here and on every node"
    try:
        facts = decode(document, NodeFacts)
    except ValueError as error:
        raise ServiceError("the autotune on a node of the Ray cluster is of another version", hint) from error
    if facts.version != __version__:
        raise ServiceError(f"the node {facts.host} has autotune {facts.version}, and here is {__version__}", hint)
    if facts.code != this_code():
        raise ServiceError(f"the autotune {__version__} on the node {facts.host} is not the one that is here", hint)
    return facts


def _difference(one: NodeFacts, other: NodeFacts, wanted: Wanted) -> str | None:
    """Return what keeps trials on two nodes from being compared; ``None`` for nothing."""
    packages = sorted({*one.packages, *other.packages})
    for name in packages:
        before, now = one.packages.get(name), other.packages.get(name)
        if before != now:
            return f"{name} {now or 'none'} and not {before or 'none'}"
    first, second = _chosen(one, wanted)[0], _chosen(other, wanted)[0]
    if first.name != second.name:
        return f"{second.name} and not {first.name}"
    if wanted.gpus and first.memory_total_bytes != second.memory_total_bytes:
        return f"{format_bytes(second.memory_total_bytes)} and not {format_bytes(first.memory_total_bytes)}"
    if first.driver != second.driver:
        return f"driver {second.driver} and not {first.driver}"
    return None


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
