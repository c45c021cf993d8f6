"""Speaks the trial server's protocol directly, so that one warm server can run jobs of many workloads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm
from tiny import AMPLE_BYTES, QUICK

from autotune.core.candidate import Candidate, Document
from autotune.core.outcome import Completed, Effort, Failed, Outcome, outcome_from_document
from autotune.core.placement import Placement
from autotune.core.workload import Workload
from autotune.devices import Device
from autotune.execution.process_environment import server_environment


@dataclass(frozen=True)
class Answer:
    """Everything that the server said about one job."""

    messages: list[Document]
    log: str

    @property
    def result(self) -> Document:
        """The job's one result."""
        (result,) = [message["result"] for message in self.messages if "result" in message]
        return dict(result)

    @property
    def outcome(self) -> Outcome:
        """The result of a trial."""
        return outcome_from_document(self.result)

    @property
    def completed(self) -> Completed:
        """The outcome of a trial that must have completed."""
        outcome = self.outcome
        assert isinstance(outcome, Completed), outcome.traceback if isinstance(outcome, Failed) else outcome
        return outcome

    @property
    def progress(self) -> list[Document]:
        """Progress records in their order."""
        return [message["progress"] for message in self.messages if "progress" in message]


class ServerClient:
    """A context manager that owns one server."""

    def __init__(self, device: Device, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._numbers = itertools.count(1)

    def __enter__(self) -> ServerClient:
        read_fd, write_fd = os.pipe()
        with open(self._folder / "server.log", "ab") as log:
            environment = server_environment(Placement.of(self._device), os.environ, offline=True)
            self.process = warm.start_module("autotune.worker.server", write_fd, log, environment)
        os.close(write_fd)
        self._reports = os.fdopen(read_fd, "rb")
        self._send({"workload": None})
        assert self.read() == {"ready": self.process.pid}
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self._reports.close()

    def _send(self, message: Document) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def read(self) -> Document:
        """The next message; every line that the server writes must be one."""
        line = self._reports.readline()
        assert line.endswith(b"\n"), f"the server left: {(self._folder / 'server.log').read_text()}"
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def run(self, job: Document) -> Answer:
        """Run one job to its end."""
        name = f"job-{next(self._numbers)}"
        log_path = self._folder / f"{name}.log"
        document = {"id": name, "timeout_seconds": 120.0, "log_path": str(log_path), **job}
        document |= {"device_kind": self._device.kind, "device_uuid": self._device.uuid}
        self._send({"job": document})
        assert self.read()["started"] == name
        messages: list[Document] = []
        while "ended" not in (message := self.read()):
            assert message["id"] == name
            messages.append(message)
        assert message["ended"] == name
        return Answer([*messages, message], log_path.read_text())

    def trial(
        self,
        workload: Workload,
        candidate: Candidate,
        effort: Effort = QUICK,
        cap_bytes: int = AMPLE_BYTES,
        **job: Any,
    ) -> Answer:
        """Run one trial to its end."""
        return self.run(
            {
                "kind": "trial",
                "workload": workload.document(),
                "candidate": candidate.parameters(),
                "cap_bytes": cap_bytes,
                "effort": dataclasses.asdict(effort),
                "seed": 42,
                **job,
            }
        )

    def inspect(self, workload: Workload) -> Document:
        """Facts about a workload."""
        return self.run({"kind": "inspect", "workload": workload.document()}).result
