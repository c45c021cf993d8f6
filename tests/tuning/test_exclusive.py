"""Test locks between real processes: who holds one, who waits, and that they are released with their holder."""

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from processes import wait_until
from searching import H200, RecordingObserver
from tiny import tiny_workload

from autotune.core.device import Device
from autotune.core.errors import DeviceError, StorageError, TrialServerError
from autotune.devices.lock import FOLDER_VARIABLE, Holder, Lock, LockError
from autotune.tuning import exclusive
from autotune.tuning.exclusive import take_turn
from autotune.tuning.request import SearchRequest
from autotune.tuning.run import run_search

pytestmark = pytest.mark.usefixtures("locks")

HOLD = """
import sys, time
from autotune.devices.lock import Lock
lock = Lock(sys.argv[1])
assert lock.acquire("theirs") is None
print("held", flush=True)
time.sleep(600)
"""

Hold = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def hold(locks: Path) -> Iterator[Hold]:
    """Starts another process that holds a lock."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str) -> subprocess.Popen[str]:
        started.append(warm.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_lock_says_who_holds_it_and_vanishes_with_the_process(hold: Hold) -> None:
    process = hold("GPU-1")
    with Lock("GPU-1") as lock:
        holder = lock.acquire("ours")
        assert (holder.pid, holder.study) == (process.pid, "theirs")
        assert f"process {process.pid} of {holder.user} (study theirs, since 20" in holder.describe()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert lock.acquire("ours") is None


def test_locks_of_other_names_are_free(hold: Hold, locks: Path) -> None:
    hold("GPU-1")
    for name in ("GPU-2", "GPU/1", "../../GPU-1", "GPU-1 ", "x" * 400, "\udcff"):
        with Lock(name) as lock:
            assert lock.acquire("ours") is None
    assert {path.parent for path in locks.rglob("*.lock")} == {locks}


def test_a_lock_is_not_inherited(tmp_path: Path) -> None:
    with Lock("GPU-1") as lock:
        assert lock.acquire("ours") is None
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with Lock("GPU-1") as again:
        assert again.acquire("ours") is None
    child.kill()
    child.wait()


def test_a_file_that_says_nothing_still_locks(hold: Hold, locks: Path) -> None:
    hold("GPU-1")
    (path,) = locks.glob("*.lock")
    path.write_text("{")
    assert Lock("GPU-1").acquire("ours") == Holder()
    assert Holder().describe() == "another process"


def test_where_no_lock_can_be_kept_that_is_said_once(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/proc/no/such")
    notes: list[str] = []
    for name in ("ours", "ours"):
        with take_turn([cpu], name, "file.db", wait=print, note=notes.append) as turn:
            assert turn == ("ours", False)
    assert len(notes) == 2
    assert notes[0].startswith("no lock can be kept in /proc/no/such: ")
    assert notes[0].endswith(f"Name another folder with {FOLDER_VARIABLE}")
    with take_turn([cpu], lambda: map(str, range(9)), "", wait=None, note=print, is_taken="0".__eq__) as (study, _):
        assert study == "1"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link for another user")
def test_a_folder_that_is_another_user_s_link_is_not_followed(locks: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    locks.symlink_to(target)
    with Lock("GPU-1") as lock:
        assert lock.acquire("ours") is None, "a link of one's own is"
    (found,) = target.iterdir()
    found.unlink()
    os.chown(locks, 12_345, 12_345, follow_symlinks=False)
    with Lock("GPU-1") as lock, pytest.raises(LockError, match="a link that another user made"):
        lock.acquire("ours")
    assert list(target.iterdir()) == []


def test_a_folder_is_made_for_all_users(locks: Path) -> None:
    with Lock("GPU-1") as lock:
        lock.acquire("ours")
    assert locks.stat().st_mode & 0o7777 == 0o1777


def test_a_link_is_not_followed(locks: Path, tmp_path: Path) -> None:
    with Lock("GPU-1") as lock:
        assert lock.acquire("ours") is None
    (path,) = locks.glob("*.lock")
    path.unlink()
    target = tmp_path / "precious"
    target.write_text("precious")
    path.symlink_to(target)
    with Lock("GPU-1") as lock, pytest.raises(LockError):
        lock.acquire("ours")
    assert target.read_text() == "precious"


class TestTurns:
    def test_a_gpu_is_refused_with_who_holds_it(self, hold: Hold) -> None:
        process = hold(H200.uuid)
        with (
            pytest.raises(DeviceError, match=rf"cuda:0 \(NVIDIA H200\) is in use by process {process.pid}") as caught,
            take_turn([H200], "ours", "file.db", wait=None, note=print),
        ):
            pass
        assert "--wait" in caught.value.hint

    def test_waiting_lasts_until_it_is_free(self, hold: Hold) -> None:
        process = hold(H200.uuid)
        notes: list[str | None] = []

        def free() -> None:
            assert wait_until(lambda: bool(notes))
            process.kill()
            process.wait()

        thread = threading.Thread(target=free)
        thread.start()
        with take_turn([H200], "ours", "file.db", wait=notes.append, note=print) as (_, has_waited):
            assert has_waited
        thread.join()
        assert notes[1:] == [None]
        assert notes[0].startswith(f"waiting for cuda:0 (NVIDIA H200), which process {process.pid} of ")

    def test_several_are_taken_in_one_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        devices = [dataclasses.replace(H200, uuid=f"GPU-{letter}", name=letter) for letter in "cab"]
        held: list[str] = []

        monkeypatch.setattr(exclusive, "Lock", lambda name: held.append(name) or Lock(name))
        for order in (devices, devices[::-1], [*devices, *devices]):
            with take_turn(order, "ours", "file.db", wait=None, note=print):
                assert held[1:] == ["GPU-a", "GPU-b", "GPU-c"], "after the study"
            held.clear()

    def test_a_cpu_is_shared_and_that_is_said(self, hold: Hold, cpu: Device) -> None:
        hold(cpu.uuid)
        notes: list[str] = []
        with take_turn([cpu], "ours", "file.db", wait=None, note=notes.append) as (_, has_waited):
            assert not has_waited
        assert len(notes) == 1
        assert "searches on this CPU, too" in notes[0]

    def test_one_search_at_a_time_in_a_study(self, cpu: Device) -> None:
        with (
            take_turn([cpu], "ours", "file.db", wait=None, note=print),
            take_turn([cpu], "other", "file.db", wait=None, note=print),
            take_turn([cpu], "ours", "other.db", wait=None, note=print),
            pytest.raises(
                StorageError, match=rf"the study 'ours' is searched by process {os.getpid()} of \w+ \(since "
            ),
            take_turn([cpu], "ours", "file.db", wait=None, note=print),
        ):
            pass


class TestNewStudies:
    """Studies whose names are made up."""

    @pytest.mark.parametrize("wait", [False, True])
    def test_no_two_get_one_name(self, wait: bool) -> None:
        devices = [dataclasses.replace(H200, uuid=f"GPU-{number}") for number in range(3)]
        with contextlib.ExitStack() as stack:
            turns = [
                stack.enter_context(
                    take_turn(
                        [device],
                        lambda: map("bert-{}".format, itertools.count(1)),
                        "file.db",
                        wait=print if wait else None,
                        note=print,
                        is_taken="bert-2".__eq__,
                    )
                )
                for device in devices
            ]
        assert [study for study, _ in turns] == ["bert-1", "bert-3", "bert-4"]
        assert not any(has_waited for _, has_waited in turns)

    @pytest.mark.parametrize("wait", [False, True])
    def test_two_searches_of_one_model_at_once(
        self, cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
    ) -> None:
        # Both get as far as starting a process.
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        storage = str(tmp_path / "studies.db")
        request = SearchRequest(tiny_workload("bert-tiny"), cpu, effective_batch=8)
        # Two names of one device, since a search with --wait would wait for the first.
        requests = [dataclasses.replace(request, device=dataclasses.replace(cpu, uuid=uuid)) for uuid in ("one", "two")]
        found: list[set[str]] = []

        class Nested(RecordingObserver):
            def note(self, text: str) -> None:
                if not text.startswith("starting a process"):
                    return
                found.append({folder.name for folder in (tmp_path / "logs").iterdir()})
                if requests:
                    search()

        def search() -> None:
            with pytest.raises(TrialServerError, match="no process for trials can be started"):
                run_search(requests.pop(), storage, Nested(), wait=print if wait else None)

        search()
        assert found == [{"bert-tiny-8"}, {"bert-tiny-8", "bert-tiny-8-2"}]


def test_two_names_of_one_database_are_one_study(cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    request = SearchRequest(tiny_workload("bert-tiny"), cpu, effective_batch=8, study="ours")
    with (
        take_turn([cpu], "ours", str(tmp_path / "folder" / "studies.db"), wait=None, note=print),
        pytest.raises(StorageError, match="the study 'ours' is searched by process"),
    ):
        run_search(request, str(tmp_path / "link" / "studies.db"), RecordingObserver())
