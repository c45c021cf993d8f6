"""Hold a process on a node of a cluster, and replace it by one on another node when that node is lost."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.errors import (
    AutotuneError,
    DeviceError,
    ServiceError,
    error_with_code,
)
from autotune.core.placement import Placement
from autotune.core.schema import decode, encode
from autotune.core.units import format_bytes, plural
from autotune.core.workload import Workload
from autotune.devices import Device
from autotune.execution.ray_cluster import ClusterNode, NodeLostError
from autotune.tuning.environment import kind_fingerprint
from autotune.tuning.nodes.messages import NodeFacts, Opened, Opening, Reply
from autotune.tuning.nodes.node import Node, this_code

# A node that is lost once may have had a fault; trials that lose three nodes are the fault.
MOST_ATTEMPTS = 3
# How long a node may take to answer: to most questions at once; others start a server, which may take minutes, or wait
# for memory of a GPU. A node that is not heard of for longer is lost.
ANSWER_SECONDS = 60.0
START_SECONDS = 600.0
END_SECONDS = 20.0
_READ_SECONDS = 2 * 3600.0
_WAIT_SECONDS = 1.0
# Without --wait. Clusters that start nodes on demand take longer.
_FREE_SECONDS = 60.0

Note = Callable[[str], None]


class Actor(Protocol):
    """A process on a node that answers one question at a time."""

    def ask(self, question: str, document: Document, timeout_seconds: float) -> Document:
        """Return the answer; raises ``NodeLostError`` where none comes in time."""

    def begin(self, question: str, document: Document) -> Any:
        """Ask without waiting; return a ticket for the answer."""

    def finish(self, ticket: Any) -> Document:
        """Return the answer, which is there; raises ``NodeLostError`` where none will come."""

    def end(self) -> None:
        """End the process at once."""


class Cluster(Protocol):
    """Starts processes on nodes."""

    address: str

    def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the nodes, those with the most GPUs first."""

    def start(self, kind: type, *, gpus: int, wait_seconds: float | None, on_wait: Callable[[], None]) -> Actor:
        """Start an object of a class on a node with so many free GPUs."""

    def answered(self, tickets: Sequence[Any], wait_seconds: float) -> list[Any]:
        """Return the tickets whose answers are there, waiting at most so long for the first."""


@dataclass(frozen=True)
class Wanted:
    """What a search needs of a cluster."""

    gpus: int
    """Of one node, for each process on it; 0 for the CPU."""
    processes: int = 1
    """Each runs one trial at a time, on a node of its own or beside others."""


class NodeProcess:
    """A process on a node. Where it is lost, one on another node that is equal takes its place."""

    def __init__(self, cluster: Cluster, wanted: Wanted, number: int, *, wait: bool, note: Note) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._number = number
        self._wait = wait
        self._note = note
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
        # Of the question what trials did, with the time at which it was asked.
        self._ticket: Any = None
        self._asked_at = 0.0

    def __enter__(self) -> Self:
        self._actor, self._facts = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ticket = None
        actor, self._actor = self._actor, None
        if actor is not None:
            # Asked to end, it removes its files, too.
            with contextlib.suppress(NodeLostError, AutotuneError):
                actor.ask("close", {}, END_SECONDS)
            actor.end()

    @property
    def host(self) -> str:
        """The node's name."""
        return self._facts.host if self._facts is not None else ""

    @property
    def facts(self) -> NodeFacts:
        """What the node said of itself."""
        assert self._facts is not None
        return self._facts

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the node that a search uses: as many GPUs as were asked for, or the CPU."""
        return _chosen(self.facts, self._wanted)

    @property
    def losses(self) -> int:
        """How many nodes were lost so far."""
        return self._losses

    def _start(self) -> tuple[Actor, NodeFacts]:
        """Start a process on a node that fits; return it with the facts about the node."""
        gpus = self._wanted.gpus

        def on_wait() -> None:
            self._note(f"waiting for {plural(gpus, 'free GPU') if gpus else 'a free core'} of the Ray cluster …")

        seconds = None if self._wait else _FREE_SECONDS
        actor = self._cluster.start(Node, gpus=gpus, wait_seconds=seconds, on_wait=on_wait)
        try:
            facts = _facts_of(self._read(actor.ask("facts", {}, ANSWER_SECONDS)))
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

    def ask(self, question: str, within_seconds: float = ANSWER_SECONDS, **document: Any) -> Any:
        """Return the answer of the node, or of the one that takes its place."""
        while True:
            try:
                return self.ask_once(question, within_seconds, **document)
            except NodeLostError as error:
                self.replace(error)

    def ask_once(self, question: str, within_seconds: float = ANSWER_SECONDS, **document: Any) -> Any:
        """Return the answer of the node; raises ``NodeLostError``."""
        if self._actor is None:
            raise NodeLostError("it has ended")
        return self._read(self._actor.ask(question, document, within_seconds))

    def _read(self, document: Document) -> Any:
        """Return what a reply says; hand on its notes and logs, and raise the error that it tells of."""
        reply = decode(document, Reply)
        for note in reply.notes:
            self._note(self._as_here(note))
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
        # Of several processes each has a server, and trials have numbers of their own.
        is_shared = self._number > 0 and not name.startswith("trial-")
        path = self._here / f"server-{self._number}" / name if is_shared else self._here / name
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
        try:
            self._open_again()
        except NodeLostError as loss:
            self.replace(loss)

    def _uuids(self, ranks: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Return the devices of each slot; on a CPU all ranks share it."""
        left = deque(device.uuid for device in self.devices)
        if self._wanted.gpus == 0:
            return tuple((left[0],) * count for count in ranks)
        return tuple(tuple(left.popleft() for _ in range(count)) for count in ranks)

    def _open_again(self) -> None:
        assert self._opening is not None
        limit = _READ_SECONDS if self._opening.wait else START_SECONDS
        self._there = decode(self.ask_once("open", limit, opening=encode(self._opening)), Opened).folder
        if self._has_read_data:
            self.ask_once("read_data", _READ_SECONDS)
        if self._inspected is not None:
            self.ask_once("run_as_inspected", workload=self._inspected.document())
        if self._context_bytes is not None:
            self.ask_once("run_trials", context_bytes=self._context_bytes)

    def replace(self, loss: NodeLostError) -> None:
        """Go on on another node that is equal; raises ``DeviceError`` where there is none."""
        lost, before = self.host, self.facts
        self._there, self._ticket = "", None
        unlike: list[Actor] = []
        try:
            while True:
                actor, self._actor = self._actor, None
                if actor is not None:
                    actor.end()
                self._losses += 1
                if self._losses >= 2 * MOST_ATTEMPTS:
                    raise DeviceError(f"{self._losses} nodes of the Ray cluster were lost", "see ray status") from loss
                self._note(f"the node {lost} was lost: {loss}; going on on another")
                try:
                    actor, facts = self._start()
                except DeviceError as error:
                    raise DeviceError(
                        f"the node {lost} was lost, and no other takes its place: {error.message}", error.hint
                    ) from loss
                difference = difference_of(before, facts, self._wanted)
                if difference is not None:
                    # It stays until an equal one is found, so that Ray does not offer it again.
                    unlike.append(actor)
                    self._note(f"the node {facts.host} is not equal: {difference}")
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
        if kind_fingerprint(self.ask_once("environment", **asked)) != fingerprint:
            raise DeviceError(
                f"the node {self.host} that took the place of a lost one measures in another environment",
                "make the nodes equal, or search anew under another --study",
            )

    def environment(self, asked: Document) -> Document:
        """Return what a measurement on the node depends on; from now on every node in its place must equal it."""
        found: Document = self.ask("environment", **asked)
        self._described = asked, kind_fingerprint(found)
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

    # What trials do

    def begin_wait(self) -> Any:
        """Ask what trials do, unless that was asked already; return the ticket of the answer.

        Raises ``NodeLostError`` where the answer is overdue.
        """
        if self._ticket is None:
            if self._actor is None:
                raise NodeLostError("it has ended")
            self._ticket = self._actor.begin("wait", {"seconds": _WAIT_SECONDS})
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > ANSWER_SECONDS:
            raise NodeLostError(f"it said nothing for {ANSWER_SECONDS:.0f} s")
        return self._ticket

    def finish_wait(self) -> list[Document]:
        """Return what trials did, whose ticket is answered; raises ``NodeLostError``."""
        ticket, self._ticket = self._ticket, None
        assert self._actor is not None
        found: list[Document] = self._read(self._actor.finish(ticket))
        return found

    def forget_wait(self) -> None:
        """Do not care for the answer any more."""
        self._ticket = None


def _chosen(facts: NodeFacts, wanted: Wanted) -> tuple[Device, ...]:
    kind = "cuda" if wanted.gpus else "cpu"
    return tuple(device for device in facts.devices if device.kind == kind)[: max(1, wanted.gpus)]


def _facts_of(document: Document) -> NodeFacts:
    """Return the facts that a node sends; raises ``ServiceError`` where its autotune is another one."""
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


def difference_of(one: NodeFacts, other: NodeFacts, wanted: Wanted) -> str | None:
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
