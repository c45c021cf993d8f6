"""Start trial servers around real trials, and around jobs that behave as told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import pytest
import warm
from tiny import AMPLE_BYTES, QUICK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.devices import Device
from autotune.execution import TrialJob, TrialServer, launch

STAND_IN = Path(__file__).with_name("stand_in_server.py")


def start_stand_in(
    module: str, result_fd: int, log: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start ``stand_in_server.py`` where a runner starts its server; see ``autotune.execution.launch``."""
    if module != "autotune.worker.server":
        return warm.start_module(module, result_fd, log, environment)
    return warm.Popen(
        [sys.executable, "-P", str(STAND_IN), str(result_fd)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=[result_fd],
        env=dict(environment),
        start_new_session=True,
    )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runners start ``stand_in_server.py`` in place of the server."""
    monkeypatch.setattr(launch, "start_module", start_stand_in)


@pytest.fixture
def stand_in_runner(stand_in: None, cpu: Device, tmp_path: Path) -> Iterator[TrialServer]:
    """A runner whose jobs behave as their ids say."""
    with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        yield runner


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], TrialJob]:
    """Makes a trial; its id says what a stand-in does in its place."""

    def make(name: str) -> TrialJob:
        return TrialJob(name, Candidate(Arm(), 4), AMPLE_BYTES, QUICK, 42, 120.0, str(tmp_path / f"{name}.log"))

    return make
