"""One warm trial server for all tests of the worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_client import ServerClient

from autotune.device import Device


@pytest.fixture(scope="session")
def trial_server(cpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerClient]:
    """A server that imported everything already; whoever kills it must have one of their own."""
    with ServerClient(cpu, tmp_path_factory.mktemp("server")) as server:
        yield server
