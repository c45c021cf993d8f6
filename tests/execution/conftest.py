"""Start trial servers around real trials, and around jobs that behave as told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny import AMPLE_BYTES, QUICK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.devices import Device
from autotune.execution import TrialJob, TrialServer

STAND_IN = Path(__file__).with_name("stand_in_server.py")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has runners start ``stand_in_server.py`` in place of the server.

    The runner calls its own interpreter as ``python -P -m autotune.worker.server …``; a script that
    drops those three words and runs the stand-in takes that interpreter's place.
    """
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))


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
