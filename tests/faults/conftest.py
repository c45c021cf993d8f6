"""Run the undisturbed search that others are compared with, and print the table at the end."""

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import wait_until
from scene import TALLY, Scene

SceneOf = Callable[..., Scene]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A search that nothing disturbs."""
    scene = undisturbed(Scene(tmp_path_factory.mktemp("undisturbed"), "undisturbed"))
    assert len(scene.ended()) >= 5
    return scene


@pytest.fixture(scope="session")
def real_reference(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """The same with torch and a real Trainer in its trials."""
    return undisturbed(Scene(tmp_path_factory.mktemp("real"), "undisturbed", real=True))


def undisturbed(scene: Scene) -> Scene:
    """The scene, searched to its end at once, with the seconds that this took."""
    started = time.monotonic()
    scene.finish()
    scene.seconds = time.monotonic() - started
    assert len(scene.outputs) == 1
    scene.check_nothing_runs()
    return scene


@pytest.fixture(scope="session")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A search that was killed after three trials, its database in one file."""
    scene = Scene(tmp_path_factory.mktemp("halfway"), "halfway")
    scene.start()
    assert wait_until(lambda: scene.is_recorded() and len(scene.ended()) >= 3, 60)
    os.kill(scene.pid, signal.SIGKILL)
    scene.wait()
    scene.check_nothing_runs()
    with contextlib.closing(sqlite3.connect(scene.database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return scene


@pytest.fixture
def scene_of(tmp_path: Path) -> SceneOf:
    """Makes a scene in the test's folder."""
    return lambda kind, seed=0, **options: Scene(tmp_path / "with space", kind, seed, **options)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was injected, what was lost."""
    if not TALLY.faults:
        return
    row = "{:<42} {:>7} {:>12} {:>8} {:>15} {:>14}".format
    terminalreporter.section("faults")
    terminalreporter.write_line(row("fault", "faults", "trials lost", "doubled", "processes left", "wrong answers"))
    for values in TALLY.rows():
        terminalreporter.write_line(row(*values))
