"""Share one warm trial server among all tests of the worker."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from data_reading import Read
from fake_meter import FakeClock
from own_data import write_tokenizer
from server_client import ServerClient
from tiny import tiny_workload

from autotune.core.dataset_spec import DataSpec
from autotune.core.device import Device
from autotune.worker.trial import measure


@pytest.fixture(scope="session")
def trial_server(cpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerClient]:
    """A server that imported everything already; whoever kills it must have one of their own."""
    with ServerClient(cpu, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The time that a step timer sees."""
    fake = FakeClock()
    monkeypatch.setattr(measure, "perf_counter", fake.perf_counter)
    return fake


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One of whole words."""
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def read(trial_server: ServerClient, tmp_path: Path) -> Callable[..., Read]:
    """``read("bert-tiny", spec)``."""

    def read(model: str, data: DataSpec, seq_len: int = 64, **changes: Any) -> Read:
        workload = dataclasses.replace(tiny_workload(model, seq_len=seq_len, **changes), data=data)
        return Read(trial_server, workload, tmp_path)

    return read
