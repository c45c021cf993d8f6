"""Share fixtures among all tests, and make the helper modules in this folder importable."""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from hypothesis import HealthCheck, settings
from machine import Machine, compile_library
from postgres import NoPostgresError, PostgresServer, shared_server

from autotune.core.device import Device
from autotune.devices.listing import find_device

_ENOUGH_BYTES = 4 << 30
"""The folders of three runs, which pytest keeps, took 1.0 GB."""

# How long an example takes, or is drawn, is the machine's matter: 200 ms pass quickly where others run on it, too.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Trials in tests are tiny: several threads gain nothing, and on a busy machine each waits for the slowest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files of tests lie in memory where there is room for them: a commit of SQLite took 0.23 ms of processor time on a disk
# and 0.015 ms there, and waits for a disk besides.
_free_bytes = shutil.disk_usage("/dev/shm").free if os.access("/dev/shm", os.W_OK) else 0
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and _free_bytes > _ENOUGH_BYTES:
    os.environ["PYTEST_DEBUG_TEMPROOT"] = "/dev/shm"

# Searches in tests hold their locks among themselves: another one on this machine is no matter of theirs.
os.environ["AUTOTUNE_LOCKS"] = tempfile.mkdtemp(prefix="autotune-test-locks-")
# The machine of the tests is busy with the tests.
os.environ["AUTOTUNE_ACCEPT_NOISE"] = "1"
atexit.register(shutil.rmtree, os.environ["AUTOTUNE_LOCKS"], ignore_errors=True)

# Runners start their servers warm, but within warm.cold(): most of a cold search is imports.
warm.take_over()

# Compiled kernels of tests stay among themselves, too; processes of pytest-xdist have this from the first one.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="autotune-test-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# A shell that runs the tests in the background has SIGINT ignored, and processes inherit that; some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)

_slow_collections: list[float] = []


@gc.callbacks.append
def _time_collection(phase: str, info: dict[str, int]) -> None:
    """Keep when a collection of all garbage began that took more than 10 ms."""
    if info["generation"] == 2 and phase == "start":
        _slow_collections.append(time.thread_time())
    elif info["generation"] == 2 and time.thread_time() - _slow_collections[-1] < 0.01:
        _slow_collections.pop()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Fork the processes of pytest-xdist from a warm one: else each imports everything twice."""
    from execnet.gateway_base import ThreadExecModel

    ThreadExecModel.subprocess = SimpleNamespace(Popen=warm.start_xdist, PIPE=subprocess.PIPE)


def pytest_collectstart() -> None:
    """Do without garbage collections while tests are imported: nearly all of it lives to the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep garbage collections from going through all modules and tests again and again; tests may set variables."""
    warm.keep_environment()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Freeze again what a test has imported, or a step on fake tensors has unfrozen."""
    # A Trainer collects all garbage: 0.4 s with the million objects of all tests. To count them took 2 ms a test.
    if _slow_collections:
        _slow_collections.clear()
        gc.collect(1)
        gc.freeze()


@pytest.fixture(scope="session")
def cpu() -> Device:
    """This machine's CPU as a device."""
    return find_device("cpu")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder that all processes of this run share."""
    folder = tmp_path_factory.getbasetemp()
    # A process of pytest-xdist has a folder of its own in that of the run.
    return folder.parent if hasattr(request.config, "workerinput") else folder


@pytest.fixture(scope="session")
def postgres_server(run_folder: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL server, which all processes of this run share; the test is skipped where none can run."""
    try:
        with shared_server(run_folder) as server:
            yield server
    except NoPostgresError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def postgres_database(postgres_server: PostgresServer) -> str:
    """The database that the tests of this process have one after the other."""
    return postgres_server.new_database()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, postgres_database: str) -> Iterator[str]:
    """An empty database with all tables on a PostgreSQL server, as ``--storage`` names it."""
    yield postgres_server.url(postgres_database)
    postgres_server.empty(postgres_database)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """An open, empty store in ``tmp_path``."""
    # Only where a test needs it: the tests' first process needs nothing of it.
    from searching import new_store

    with new_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the locks of this test."""
    monkeypatch.setenv("AUTOTUNE_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled stand-in library."""
    return compile_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library_folder: Path) -> Machine:
    """The stand-in library with the installed binding."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    return Machine(library_folder, None)
