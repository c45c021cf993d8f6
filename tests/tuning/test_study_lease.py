"""Searches of one study on two hosts that share a database: processes with a host name and lock folder of their own."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import warm
from processes import wait_until
from recorded import EFFECTIVE_64, RecordedRunner
from searching import RecordingObserver, search
from tiny import tiny_workload

from autotune.core.candidate import Candidate
from autotune.core.device import Device
from autotune.core.errors import StorageError
from autotune.core.placement import Owner, this_host
from autotune.devices.lock import FOLDER_VARIABLE
from autotune.store.leases import LEASE_SECONDS, Leases, name_of_study
from autotune.store.opening import open_store
from autotune.store.records import Stage, now
from autotune.store.repository import Store
from autotune.tuning.exclusive import hold_lease
from autotune.tuning.request import SearchRequest
from autotune.tuning.run import run_search

pytestmark = pytest.mark.usefixtures("locks")

HOLD = """
import platform, sys
platform.node = lambda: sys.argv[2]
from autotune.store.opening import open_store
from autotune.tuning.exclusive import hold_lease
with open_store(sys.argv[1]) as store, hold_lease(store, "ours", wait=None):
    print("held", flush=True)
    sys.stdin.readline()
"""

Hold = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def hold(store: Store, tmp_path: Path) -> Iterator[Hold]:
    """Starts a process of a host that holds the lease of the study ``ours`` until its input ends."""
    started: list[subprocess.Popen[str]] = []

    def start(host: str) -> subprocess.Popen[str]:
        process = warm.Popen(
            [sys.executable, "-c", HOLD, str(store.path), host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, FOLDER_VARIABLE: str(tmp_path / f"locks of {host}")},
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def test_a_search_on_another_host_is_named(hold: Hold, store: Store, cpu: Device) -> None:
    process = hold("gpu-2")
    request = SearchRequest(tiny_workload("bert-tiny"), cpu, effective_batch=8, study="ours")
    with pytest.raises(StorageError, match=rf"'ours' is searched by process {process.pid} of \w+ on gpu-2") as caught:
        run_search(request, str(store.path), RecordingObserver())
    assert "--wait" in caught.value.hint


def test_waiting_lasts_until_the_other_host_lets_go(hold: Hold, store: Store) -> None:
    process = hold("gpu-2")
    notes: list[str] = []

    def note(text: str | None) -> None:
        if text is not None:
            notes.append(text)
            process.stdin.close()

    with hold_lease(store, "ours", wait=note) as has_waited:
        assert has_waited
    assert len(notes) == 1
    assert notes[0].startswith(f"waiting for the study ours, which process {process.pid} of ")
    assert store.leases.holder(name_of_study("ours")) is None


def test_after_a_kill_on_this_host_nobody_waits(hold: Hold, store: Store) -> None:
    process = hold(this_host())
    process.send_signal(signal.SIGKILL)
    process.wait()
    with hold_lease(store, "ours", wait=None) as has_waited:
        assert not has_waited


def test_after_a_kill_on_another_host_its_lease_has_to_expire(
    hold: Hold, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hold("gpu-2")
    process.send_signal(signal.SIGKILL)
    process.wait()
    passed: list[timedelta] = []
    monkeypatch.setattr(store.leases, "_clock", lambda: sum(passed, now()))

    def wait(text: str | None) -> None:
        passed.append(timedelta(seconds=LEASE_SECONDS + 1))

    with hold_lease(store, "ours", wait=wait) as has_waited:
        assert has_waited


def test_a_lease_is_renewed_as_long_as_it_is_held(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.store.leases.LEASE_SECONDS", 0.2)
    with hold_lease(store, "ours", wait=None):
        first = store.leases.holder(name_of_study("ours"))

        def is_renewed() -> bool:
            lease = store.leases.holder(name_of_study("ours"))
            return lease is not None and lease.heartbeat_at > first.heartbeat_at

        assert wait_until(is_renewed)


def test_a_search_that_lost_its_lease_stops_and_writes_nothing_more(store: Store) -> None:
    """As after a long pause of its process: another host has taken the study over, and runs a trial of its own."""
    taken: list[str] = []

    class Losing(RecordingObserver):
        def trial_begins(self, number: int, candidate: Candidate, stage: Stage) -> None:
            super().trial_begins(number, candidate, stage)
            if number == 2:
                with open_store(str(store.path)) as other:
                    leases = Leases(other.engine, "theirs", lambda: now() + timedelta(seconds=LEASE_SECONDS + 1))
                    theirs = Owner("ada", "gpu-2", "gpu-2", 71, "1")
                    assert leases.take(name_of_study("bert"), theirs, "theirs") is None
                    taken.extend(_dump(other))

    observer, runner = Losing(), RecordedRunner(EFFECTIVE_64)
    with (
        hold_lease(store, "bert", wait=None),
        pytest.raises(StorageError, match="'bert' is no longer this search's: process 71 of ada on gpu-2") as caught,
    ):
        search(store, runner, observer)
    assert len(caught.value.message.splitlines()) == 1
    assert len(runner.jobs) == 3
    with open_store(str(store.path)) as other:
        assert list(_dump(other)) == taken
        holder = other.leases.holder(name_of_study("bert"))
        assert holder.token == "theirs"


def _dump(store: Store) -> list[str]:
    """Everything in the database, as SQL."""
    with closing(sqlite3.connect(str(store.path))) as connection:
        return list(connection.iterdump())
