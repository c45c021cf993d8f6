"""Start trial servers around real trials, and around jobs that behave as told."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from tiny import AMPLE_BYTES, QUICK, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Device
from autotune.execution import TrialJob, TrialServer, child_process

STAND_IN = Path(__file__).with_name("stand_in_server.py")


class StandIn(warm.Popen):
    """Starts ``stand_in_server.py`` where a runner starts its server."""

    def __init__(self, words: list[str], **options: Any) -> None:
        python, _, _, module, *arguments = words
        super().__init__(
            [python, "-P", str(STAND_IN), *arguments] if module == "autotune.worker.server" else words, **options
        )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runners start ``stand_in_server.py`` in place of the server."""
    monkeypatch.setattr(child_process, "Popen", StandIn)


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
