"""Share fixtures among all tests, and make the helper modules in this folder importable."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import warm
from machine import Machine, compile_library

from autotune.devices import Device, find_device
from autotune.execution import launch

# Trials in tests are tiny: several threads gain nothing, and on a busy machine each waits for the slowest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Searches in tests hold their locks among themselves: another one on this machine is no matter of theirs.
os.environ["AUTOTUNE_LOCKS"] = tempfile.mkdtemp(prefix="autotune-test-locks-")
atexit.register(shutil.rmtree, os.environ["AUTOTUNE_LOCKS"], ignore_errors=True)

# Runners start their servers warm, but within warm.cold(): most of a cold search is imports.
launch.start_module = warm.start_module

# A shell that runs the tests in the background has SIGINT ignored, and processes inherit that; some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cpu() -> Device:
    """This machine's CPU as a device."""
    return find_device("cpu")


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the compiled stand-in library."""
    return compile_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library_folder: Path) -> Machine:
    """The stand-in library with the installed binding."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    return Machine(library_folder, None)
