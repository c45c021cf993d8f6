"""A service within this process, over a real database, and clients that speak to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from searching import H200, write_empty_database
from serving import URL, StandInEngine, predict, with_token
from starlette.testclient import TestClient

from autotune.core.device import Device
from autotune.service import routes
from autotune.service.app import make_app
from autotune.service.searches import Searches
from autotune.store.opening import open_store
from autotune.store.repository import Store


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A folder of the operator's, whose models and datasets may be named."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def engine() -> StandInEngine:
    """What runs the searches: without a device, at first."""
    return StandInEngine()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.service)])
def searches(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    data_folder: Path,
    engine: StandInEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Searches]:
    """The searches of a service; ``make test-service`` has them on a PostgreSQL server as well."""
    # A database of a busy machine may take longer than a second to answer.
    monkeypatch.setattr(routes, "_HEALTH_SECONDS", 60.0)
    is_file = request.param == "sqlite"
    storage = str(tmp_path / "studies" / "autotune.db" if is_file else request.getfixturevalue("postgres_url"))
    if is_file:
        write_empty_database(Path(storage))
    with open_store(storage) as store:
        made = Searches(store, storage, engine, data_folders=(data_folder,))
        engine.wake = made.runner.wake
        yield made


@pytest.fixture
def store(searches: Searches) -> Store:
    """The service's database."""
    return searches.store


@pytest.fixture
def server(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A client without a token."""
    monkeypatch.setattr(searches.predictions, "predict", predict)
    with TestClient(make_app(searches), base_url=URL, follow_redirects=False) as client:
        yield client


@pytest.fixture
def writer(server: TestClient, store: Store) -> TestClient:
    """A client whose token may run searches."""
    return with_token(server, store.queue.add_token("writer", "run"))


@pytest.fixture
def reader(server: TestClient, store: Store) -> TestClient:
    """A client whose token may read."""
    return with_token(server, store.queue.add_token("reader", "read"))


@pytest.fixture
def on_cpu(engine: StandInEngine, cpu: Device) -> StandInEngine:
    """The engine with this machine's CPU."""
    engine.add(cpu)
    return engine


@pytest.fixture
def on_gpu(engine: StandInEngine) -> StandInEngine:
    """The engine with a made-up H200."""
    engine.add(H200)
    return engine
