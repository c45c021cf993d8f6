"""Speaks the trial server's protocol directly, so that one warm server can run jobs of many workloads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import AMPLE_BYTES, QUICK

from autotune.core import messages
from autotune.core.candidate import Candidate, Document
from autotune.core.code_interface import Protection
from autotune.core.device import Device
from autotune.core.inspection import Inspection, ModelFacts
from autotune.core.messages import InspectionWork, Job, Problem, Progress, TrialWork, Work
from autotune.core.outcome import Completed, Effort, Failed, Outcome
from autotune.core.placement import Placement
from autotune.core.schema import decode
from autotune.core.training_source import find_script
from autotune.core.workload import Workload
from autotune.execution.child_process import ChildProcess, outcome_of, server_environment
from autotune.execution.oneshot import find_protection


@dataclass(frozen=True)
class Answer:
    """Everything that the server said about one job."""

    progress: list[Progress]
    end: messages.Answer
    log: str

    @property
    def result(self) -> Document:
        """The job's one result."""
        return dict(self.end.result)

    @property
    def inspected(self) -> Inspection:
        """The result of an inspection that must have one."""
        assert self.end.result is not None, f"{self.end}\n{self.log}"
        return decode(self.result, Inspection)

    @property
    def problem(self) -> Problem:
        """What kept the user's code from being inspected."""
        assert self.end.problem is not None
        return self.end.problem

    @property
    def outcome(self) -> Outcome:
        """The result of a trial."""
        return outcome_of(self.end, 0.0, "")

    @property
    def completed(self) -> Completed:
        """The outcome of a trial that must have completed."""
        outcome = self.outcome
        assert isinstance(outcome, Completed), outcome.traceback if isinstance(outcome, Failed) else outcome
        return outcome

    @property
    def failed(self) -> Failed:
        """The outcome of a trial that must have failed."""
        outcome = self.outcome
        assert isinstance(outcome, Failed), outcome
        return outcome


def of_command(*words: str) -> Workload:
    """The workload of a command line of one's own."""
    return Workload.of_source(find_script(words))


class ServerClient:
    """A context manager that owns one server."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.device = self._device = device
        self._folder = folder
        self._numbers = itertools.count(1)
        self.protection: Protection | None = None
        """Of the user's own code; the best that this machine offers where there is none."""

    def __enter__(self) -> ServerClient:
        with open(self._folder / "server.log", "ab") as log:
            environment = server_environment(Placement.of(self._device), os.environ, offline=True)
            self.process = ChildProcess("autotune.worker.server", log, environment)
        self._lines = self.process.reports.lines()
        self._send({"workload": None})
        assert self.read() == {"ready": self.process.pid}
        return self

    def __exit__(self, *_: object) -> None:
        self.process.end(60.0)

    def _send(self, message: Document) -> None:
        assert self.process.send(message, time.monotonic() + 60.0)

    def read(self) -> Document:
        """The next message; every line that the server writes must be one."""
        line = next(self._lines, None)
        assert line is not None, f"the server left: {(self._folder / 'server.log').read_text()}"
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def run(self, workload: Workload, work: Work, timeout_seconds: float = 120.0) -> Answer:
        """Run one job to its end."""
        protection = (self.protection or Protection(find_protection().kind)) if workload.source is not None else None
        name = f"job-{next(self._numbers)}"
        log_path = self._folder / f"{name}.log"
        self._send({"job": Job(name, workload, work, timeout_seconds, str(log_path), protection).document()})
        assert self.read()["started"] == name
        progress: list[Progress] = []
        while isinstance(line := messages.server_line(self.read()), messages.ProgressLine):
            assert line.id == name
            progress.append(line.progress)
        assert isinstance(line, messages.Ended)
        assert line.ended == name
        return Answer(progress, line.answer, log_path.read_text())

    def trial(
        self,
        workload: Workload,
        candidate: Candidate,
        effort: Effort = QUICK,
        cap_bytes: int = AMPLE_BYTES,
        timeout_seconds: float = 120.0,
        **changes: Any,
    ) -> Answer:
        """Run one trial to its end."""
        work = TrialWork(candidate, Placement.of(self._device).rank_devices, cap_bytes, effort, 42)
        return self.run(workload, dataclasses.replace(work, **changes), timeout_seconds)

    def inspection(self, workload: Workload, timeout_seconds: float = 120.0) -> Answer:
        """All that is said while a workload is inspected."""
        return self.run(workload, InspectionWork(Placement.of(self._device).rank_devices), timeout_seconds)

    def inspect(self, workload: Workload) -> Inspection:
        """Facts about a workload."""
        return self.inspection(workload).inspected

    def prepared(self, workload: Workload) -> tuple[Workload, ModelFacts]:
        """The workload of one's own code with the interface that its inspection found, and the model's facts."""
        model = self.model(workload)
        assert workload.source is not None
        source = dataclasses.replace(workload.source, interface=model.interface)
        return Workload.of_source(source), model

    def model(self, workload: Workload) -> ModelFacts:
        """Facts about a workload's model."""
        return self.inspect(workload).model
