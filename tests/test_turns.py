"""Locks between real processes: who holds one, who waits, and that they vanish with their holder."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import wait_until
from searching import H200

from autotune.device import Device
from autotune.device.lock import FOLDER_VARIABLE, Holder, Lock
from autotune.errors import DeviceError, StorageError
from autotune.turns import take_turn

HOLD = """
import sys, time
from autotune.device.lock import Lock
lock = Lock(sys.argv[1])
assert lock.acquire("theirs") is None
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the locks of this test."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


def hold(name: str) -> subprocess.Popen[str]:
    """Another process that holds a lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_says_who_holds_it_and_vanishes_with_the_process() -> None:
    process = hold("GPU-1")
    with Lock("GPU-1") as lock:
        holder = lock.acquire("ours")
        assert holder is not None
        assert (holder.pid, holder.study) == (process.pid, "theirs")
        assert f"process {process.pid} of {holder.user} (study theirs, since 20" in holder.describe()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert lock.acquire("ours") is None


def test_locks_of_other_names_are_free(folder: Path) -> None:
    process = hold("GPU-1")
    for name in ("GPU-2", "GPU/1", "../../GPU-1", "GPU-1 ", "x" * 400, "\udcff"):
        with Lock(name) as lock:
            assert lock.acquire("ours") is None
    assert {path.parent for path in folder.rglob("*.lock")} == {folder}
    process.kill()
    process.wait()


def test_a_lock_is_not_inherited(tmp_path: Path) -> None:
    with Lock("GPU-1") as lock:
        assert lock.acquire("ours") is None
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with Lock("GPU-1") as again:
        assert again.acquire("ours") is None
    child.kill()
    child.wait()


def test_a_file_that_says_nothing_still_locks(folder: Path) -> None:
    process = hold("GPU-1")
    (path,) = folder.glob("*.lock")
    path.write_text("{")
    assert Lock("GPU-1").acquire("ours") == Holder()
    assert Holder().describe() == "another process"
    process.kill()
    process.wait()


def test_where_no_lock_can_be_kept_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/proc/no/such")
    with Lock("GPU-1") as one, Lock("GPU-1") as other:
        assert one.acquire("ours") is None
        assert other.acquire("ours") is None


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    with Lock("GPU-1") as lock:
        assert lock.acquire("ours") is None
    (path,) = folder.glob("*.lock")
    path.unlink()
    target = tmp_path / "precious"
    target.write_text("precious")
    path.symlink_to(target)
    with Lock("GPU-1") as lock:
        lock.acquire("ours")
    assert target.read_text() == "precious"


class TestTurns:
    def test_a_gpu_is_refused_with_who_holds_it(self) -> None:
        process = hold(H200.uuid)
        with (
            pytest.raises(
                DeviceError, match=rf"cuda:0 \(NVIDIA H200\) is searched on by process {process.pid}"
            ) as caught,
            take_turn(H200, "ours", "file.db", wait=False, note=print),
        ):
            pass
        assert "--wait" in caught.value.hint
        process.kill()
        process.wait()

    def test_waiting_lasts_until_it_is_free(self) -> None:
        process = hold(H200.uuid)
        notes: list[str] = []

        def free() -> None:
            assert wait_until(lambda: bool(notes))
            process.kill()
            process.wait()

        thread = threading.Thread(target=free)
        thread.start()
        with take_turn(H200, "ours", "file.db", wait=True, note=notes.append) as waited:
            assert waited
        thread.join()
        assert len(notes) == 1
        assert notes[0].startswith(f"waiting for cuda:0 (NVIDIA H200), which process {process.pid} of ")

    def test_another_gpu_is_free(self) -> None:
        process = hold(H200.uuid)
        other = dataclasses.replace(H200, uuid="GPU-other")
        with take_turn(other, "ours", "file.db", wait=False, note=print) as waited:
            assert not waited
        process.kill()
        process.wait()

    def test_a_cpu_is_shared_and_that_is_said(self, cpu: Device) -> None:
        process = hold(cpu.uuid)
        notes: list[str] = []
        with take_turn(cpu, "ours", "file.db", wait=False, note=notes.append) as waited:
            assert not waited
        assert len(notes) == 1
        assert "searches on this CPU, too" in notes[0]
        process.kill()
        process.wait()

    def test_one_search_at_a_time_in_a_study(self, cpu: Device) -> None:
        with (
            take_turn(cpu, "ours", "file.db", wait=False, note=print),
            take_turn(cpu, "other", "file.db", wait=False, note=print),
            take_turn(cpu, "ours", "other.db", wait=False, note=print),
            pytest.raises(StorageError, match=f"the study 'ours' is searched by process {os.getpid()}"),
            take_turn(cpu, "ours", "file.db", wait=False, note=print),
        ):
            pass


def test_a_lock_that_is_let_go_can_be_had_again() -> None:
    started = time.monotonic()
    for _ in range(100):
        with Lock("GPU-1") as lock:
            assert lock.acquire("ours") is None
    assert time.monotonic() - started < 60
