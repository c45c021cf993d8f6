"""Run one search on a node of a cluster, as an actor: the node's side.

The actor starts the process that searches, and keeps what it says until whoever started it has asked for it and
acknowledged it. One that nobody asks for a while ends itself, with its search. It knows nothing of Ray.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.placement import this_host
from autotune.core.schema import decode, encode
from autotune.devices.listing import list_devices
from autotune.engine.local import LocalRun, SearchProcess
from autotune.engine.work import Work
from autotune.tuning.answer_cache import code_digest

PATIENCE_SECONDS = 600.0
"""How long an actor waits for somebody to ask: a service may be started anew meanwhile."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Ray's launcher puts its own copies of libraries first among the folders of modules.
_RAY_FOLDERS = ("ray/thirdparty_files", "ray/_private/workers")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself."""

    host: str
    version: str
    """Of autotune."""
    code: str
    """A digest of autotune's modules: two sides understand each other where it is equal."""
    devices: tuple[Device, ...]
    """The GPUs that Ray may give to searches there, then the CPU."""


def facts_here() -> NodeFacts:
    """Return host name, versions and devices of this machine."""
    return NodeFacts(this_host(), __version__, code_digest(), list_devices())


class SearchActor:
    """One search on this node."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
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
        # What this process can import its child can: the folder of this package may be known to Ray alone.
        sys.path[:] = [folder for folder in sys.path if not folder.endswith(_RAY_FOLDERS)]
        os.environ["PYTHONPATH"] = os.pathsep.join(folder or os.getcwd() for folder in sys.path)

    def facts(self, most_gpus: int) -> Document:
        """Return the facts about this node, with the first ``most_gpus`` GPUs, which Ray may assign."""
        # This actor itself was given none.
        visible = _variable_of_raylet(_VISIBLE)
        os.environ.pop(_VISIBLE, None)
        if visible is not None:
            os.environ[_VISIBLE] = visible
        facts: Document = encode(facts_here())
        gpus = [device for device in facts["devices"] if device["kind"] == "cuda"]
        facts["devices"] = [device for device in facts["devices"] if device not in gpus[most_gpus:]]
        return facts

    def begin(self, work: Document) -> None:
        """Start the search; only one per actor."""
        self._asked_at = time.monotonic()
        if self._run is not None:
            return
        self._child = SearchProcess(None, lambda child, why: None)
        self._run = self._child.begin(decode(work, Work))
        threading.Thread(target=self._watch, args=(os._exit,), name="patience", daemon=True).start()

    def messages(self, after: int, wait_seconds: float) -> list[Document]:
        """Return the messages after number ``after``, and drop those up to it."""
        self._asked_at = time.monotonic()
        if self._run is None:
            return []
        messages = self._run.messages(after, wait_seconds)
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
        """End the search and this process once no client has called for too long."""
        while (left := self._asked_at + self._patience_seconds - time.monotonic()) > 0:
            time.sleep(min(left, 10.0) + 0.01)
        self.end()
        leave(0)


def _variable_of_raylet(name: str) -> str | None:
    """Return an environment variable of the Ray process that started this process."""
    raylet = os.environ.get("RAY_RAYLET_PID")
    if raylet is not None:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0"):
                key, _, value = entry.partition(b"=")
                if key.decode("utf-8", "replace") == name:
                    return value.decode("utf-8", "replace")
    return None
