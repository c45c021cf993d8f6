"""Run searches on the nodes of a Ray cluster: a detached, named actor for each, and what it does on its node.

The actor starts the process that searches, and keeps its messages until the client has acknowledged them. An actor that
no client asks for ``PATIENCE_SECONDS`` ends itself, with its search. The process that searches knows nothing of Ray.

The actor holds the GPUs that Ray gave it, and is not restarted by Ray: a search that lost its node is started again by
whoever asked for it, from what is recorded. A process that was started anew finds the actors again by their names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import AutotuneError, DeviceError, ServiceError
from autotune.core.placement import this_host
from autotune.core.schema import decode, encode
from autotune.devices.listing import list_devices
from autotune.engine.local import LocalRun, SearchProcess
from autotune.engine.ray_cluster import ClusterNode, NodeLostError, RayCluster
from autotune.engine.work import Host, Message, Run, Work
from autotune.tuning.answer_cache import code_digest

PATIENCE_SECONDS = 600.0
"""How long an actor waits for somebody to ask: a service may be started anew meanwhile."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Ray's launcher puts its own copies of libraries first among the folders of modules.
_RAY_FOLDERS = ("ray/thirdparty_files", "ray/_private/workers")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node of the cluster tells of itself, before searches are sent to it."""

    host: str
    version: str
    """Of autotune."""
    code: str
    """A digest of autotune's modules: two sides understand each other where it is equal."""
    devices: tuple[Device, ...]
    """The GPUs that Ray may give to searches there, then the CPU."""


def facts_here() -> NodeFacts:
    """Return host name, version, code digest and devices of this machine."""
    return NodeFacts(this_host(), __version__, code_digest(), list_devices())


class SearchActor:
    """A Ray actor that runs one search on its node, in a child process, and hands out the search's messages."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Take the time that the actor waits for a call before it ends itself; prepare the environment of trials."""
        self._patience_seconds = patience_seconds
        self._asked_at = time.monotonic()
        self._child: SearchProcess | None = None
        self._run: LocalRun | None = None
        if "RAY_RAYLET_PID" not in os.environ:
            return
        # Trials run as they would without Ray. It sets OMP_NUM_THREADS to the cores that an actor reserved, 1 for none,
        # where its own process (the raylet) has not got it.
        if _variable_of_raylet("OMP_NUM_THREADS") is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        # The child process can import what this one can: the folder of this package may be known to Ray alone.
        sys.path[:] = [folder for folder in sys.path if not folder.endswith(_RAY_FOLDERS)]
        os.environ["PYTHONPATH"] = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # From now on, since the client that made this actor may be gone before it calls ``begin``.
        threading.Thread(target=self._watch, args=(os._exit,), name="patience", daemon=True).start()

    def facts(self, most_gpus: int) -> Document:
        """Return the ``NodeFacts`` of this node, with its first ``most_gpus`` GPUs, as many as Ray may assign."""
        # Ray hides all GPUs from this actor, which was given none. Use the variable of the node's own Ray process.
        visible = _variable_of_raylet(_VISIBLE)
        os.environ.pop(_VISIBLE, None)
        if visible is not None:
            os.environ[_VISIBLE] = visible
        facts: Document = encode(facts_here())
        gpus = [device for device in facts["devices"] if device["kind"] == "cuda"]
        facts["devices"] = [device for device in facts["devices"] if device not in gpus[most_gpus:]]
        return facts

    def begin(self, work: Document) -> None:
        """Start the search of some ``Work``; do nothing where the actor has one already."""
        self._asked_at = time.monotonic()
        if self._run is not None:
            return
        self._child = SearchProcess(None, lambda child, why: None)
        self._run = self._child.begin(decode(work, Work))

    def messages(self, after: int, wait_seconds: float) -> list[Document]:
        """Return the search's messages after number ``after``, waiting at most ``wait_seconds``; drop older ones."""
        self._asked_at = time.monotonic()
        if self._run is None:
            return []
        messages = self._run.messages(after, wait_seconds)
        # The wait itself does not count as time in which no client called.
        self._asked_at = time.monotonic()
        return [encode(message) for message in messages]

    def cancel(self) -> None:
        """Cancel the search."""
        if self._run is not None:
            self._run.cancel()

    def end(self) -> None:
        """End the process of the search, before the actor ends."""
        if self._child is not None:
            self._child.tell_to_end()
            self._child.wait(5.0)

    def _watch(self, leave: Callable[[int], object]) -> None:
        """End the search, then this process by ``leave``, once no client has called for ``_patience_seconds``."""
        while (left_seconds := self._asked_at + self._patience_seconds - time.monotonic()) > 0:
            time.sleep(min(left_seconds, 10.0) + 0.01)
        self.end()
        leave(0)


def _variable_of_raylet(name: str) -> str | None:
    """Return an environment variable of Ray's process on this node (raylet); ``None`` where it is not known."""
    raylet = os.environ.get("RAY_RAYLET_PID")
    if raylet is not None:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0"):
                key, _, value = entry.partition(b"=")
                if key.decode("utf-8", "replace") == name:
                    return value.decode("utf-8", "replace")
    return None


_REFRESH_SECONDS = 5.0
_FACTS_SECONDS = 60.0
_AWAY_SECONDS = 2.0
_REFUSED_SECONDS = 60.0  # A refused node is asked again after this: why its process failed may have passed.

log = logging.getLogger("autotune.engine")


class RayRun:
    """A search in an actor of a cluster, as its client sees it."""

    def __init__(self, cluster: RayCluster, work_id: str, actor: Any, patience_seconds: float) -> None:
        """Take the search of an actor that is named ``work_id`` and waits ``patience_seconds`` for a call."""
        self._cluster, self._work_id, self._actor = cluster, work_id, actor
        self._patience_seconds = patience_seconds
        self._ticket: Any = None
        """Ray's reference to the messages that the actor was asked for; ``None`` where none are outstanding."""
        self._away_since: float | None = None
        """The ``time.monotonic`` from which the cluster has not answered; ``None`` where it does."""

    def messages(self, after: int, wait_seconds: float) -> list[Message]:
        """See ``Run.messages``. Where the cluster is silent for longer than the actor waits, the search is lost."""
        try:
            if self._ticket is None:
                self._ticket = self._cluster.call(self._actor, "messages", after, wait_seconds)
            # An actor that waits for free GPUs answers once it has them.
            if not self._cluster.is_ready(self._ticket, wait_seconds + 1.0):
                return []
            ticket, self._ticket = self._ticket, None
            messages: list[Document] = self._cluster.get(ticket)
        except NodeLostError as error:
            return self._lost_message(after, str(error))
        except ServiceError as error:
            return self._wait_for_the_cluster(after, error)
        self._away_since = None
        return [decode(message, Message) for message in messages]

    @staticmethod
    def _lost_message(after: int, why: str) -> list[Message]:
        return [Message(after + 1, "end", {"state": "lost", "why": f"its node was lost: {why}"})]

    def _wait_for_the_cluster(self, after: int, error: ServiceError) -> list[Message]:
        """Try to reconnect. Return no messages, or the end of a lost search once the actor waits no longer."""
        # A reference does not outlive its connection.
        self._ticket = None
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            log.info("the cluster is away: %s", error.message)
        if now - self._away_since > self._patience_seconds:
            return self._lost_message(after, error.message)
        try:
            self._cluster.connect_again()
            actor = self._cluster.find(self._work_id)
        except (ServiceError, NodeLostError):
            time.sleep(_AWAY_SECONDS)
            return []
        if actor is None:
            return self._lost_message(after, "the cluster does not know it any more")
        self._actor = actor
        return []

    def cancel(self) -> None:
        """Tell the actor to cancel its search; the end is a message. See ``Run.cancel``."""
        with contextlib.suppress(ServiceError, NodeLostError):
            self._cluster.call(self._actor, "cancel")

    def close(self) -> None:
        """End the actor and, if it still runs, its search. See ``Run.close``."""
        with contextlib.suppress(AutotuneError, NodeLostError):
            ended = self._cluster.call(self._actor, "end")
            self._cluster.is_ready(ended, 6.0)
        self._cluster.kill(self._actor)


class RayEngine:
    """Runs searches on the nodes of one Ray cluster, of which a thread keeps a list."""

    shares_storage = False

    def __init__(self, address: str, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Connect to a cluster. Raises ``ServiceError`` where it is missing or must not be used."""
        self._patience_seconds = patience_seconds
        self._cluster = RayCluster(address)
        self._cluster.connect()
        self._here = facts_here()
        self._facts: dict[str, NodeFacts] = {}
        """Of each node that is used, by its id."""
        self._refused: dict[str, tuple[str, float]] = {}
        """Of each node that is not used: why, and the ``time.monotonic`` at which it was asked."""
        self._hosts: tuple[Host, ...] = ()
        self._away: str | None = None
        """Why the cluster does not answer; ``None`` where it does."""
        self._is_closing = threading.Event()
        self.refresh()
        self._thread = threading.Thread(target=self._refresh_often, name="cluster", daemon=True)
        self._thread.start()

    def _refresh_often(self) -> None:
        """Refresh the nodes periodically, and reconnect after errors."""
        while not self._is_closing.wait(_REFRESH_SECONDS):
            try:
                self.refresh()
                self._away = None
            except AutotuneError as error:
                self._away = error.message
                self._hosts = ()
                with contextlib.suppress(AutotuneError):
                    self._cluster.connect_again()

    def refresh(self) -> None:
        """Update the hosts from the cluster's nodes, and ask new nodes for their facts."""
        nodes = {node.id: node for node in self._cluster.nodes()}
        self._refused = {key: self._refused[key] for key in nodes if key in self._refused}
        hosts = []
        for key, node in nodes.items():
            facts = self._facts_of(node) if node.gpus or node.cpus else None
            if facts is None:
                continue
            gpus = [device for device in facts.devices if device.kind == "cuda"]
            devices = gpus or [device for device in facts.devices if device.kind == "cpu"]
            # Nodes on one machine have the same host name and UUIDs; the node's id tells their devices apart.
            hosts.append(Host(facts.host, tuple(replace(each, uuid=f"{each.uuid}@{key}") for each in devices), key))
        self._hosts = tuple(hosts)

    def _facts_of(self, node: ClusterNode) -> NodeFacts | None:
        """Return the facts of a node; ``None`` where it is silent, cannot run autotune, or runs another version."""
        if node.id in self._facts:
            return self._facts[node.id]
        if node.id in self._refused and time.monotonic() - self._refused[node.id][1] < _REFUSED_SECONDS:
            return None
        actor = self._cluster.start(SearchActor, (), node.id, gpus=0, cpus=0, name=None)
        try:
            ticket = self._cluster.call(actor, "facts", node.gpus)
            if not self._cluster.is_ready(ticket, _FACTS_SECONDS):
                return None
            facts = decode(self._cluster.get(ticket), NodeFacts)
        except ServiceError as error:
            # The cluster may answer again: the node is asked anew at the next refresh.
            log.info("the node %s gave no answer: %s", node.host, error.message)
            return None
        except (NodeLostError, AutotuneError, ValueError) as error:
            why, advice = f"the node {node.host} cannot run autotune: {error}", "it is asked again soon"
        else:
            if (facts.version, facts.code) == (self._here.version, self._here.code):
                self._refused.pop(node.id, None)
                self._facts[node.id] = facts
                return facts
            what = f"autotune {facts.version}" if facts.version != __version__ else "other modules of autotune"
            why, advice = f"the node {facts.host} has {what}, and here is {__version__}", "install the same there"
        finally:
            self._cluster.kill(actor)
        if self._refused.get(node.id, ("",))[0] != why:
            log.info("%s; %s", why, advice)
        self._refused[node.id] = (why, time.monotonic())
        return None

    def hosts(self) -> Sequence[Host]:
        """Return the nodes with their free devices, as of the last refresh; see ``Engine.hosts``."""
        return self._hosts

    def problems(self) -> Sequence[str]:
        """Return why nodes are unusable: the cluster does not answer, or a node was refused."""
        return [*([self._away] if self._away else []), *(why for why, _ in list(self._refused.values()))]

    def start(self, work: Work, host: Host) -> Run:
        """Start an actor for the work on a node, with as many GPUs as the work has devices; see ``Engine.start``."""
        wanted = [device for device in host.devices if device.uuid in work.devices]
        gpus = sum(device.kind == "cuda" for device in wanted)
        # A search on a CPU trains with all cores. One reserved core keeps a second search away.
        actor = self._cluster.start(
            SearchActor, (self._patience_seconds,), host.node, gpus=gpus, cpus=0 if gpus else 1, name=work.id
        )
        try:
            self._cluster.call(actor, "begin", encode(replace(work, devices=())))
        except NodeLostError as error:
            raise DeviceError(f"the node {host.name} was lost at once: {error}", "see ray status") from error
        return RayRun(self._cluster, work.id, actor, self._patience_seconds)

    def find(self, work_id: str) -> Run | None:
        """Return the run of the actor named ``work_id``; ``None`` where there is none. See ``Engine.find``."""
        actor = self._cluster.find(work_id)
        return None if actor is None else RayRun(self._cluster, work_id, actor, self._patience_seconds)

    def close(self) -> None:
        """Disconnect; searches continue without this process for as long as their actors wait. See ``Engine.close``."""
        self._is_closing.set()
        self._cluster.close()
