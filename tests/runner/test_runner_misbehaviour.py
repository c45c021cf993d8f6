"""Whatever a trial process does, the runner makes an outcome of it, goes on, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import all_gone, children, is_alive, processes_named, wait_until
from run_trial import run_trial
from tiny import tiny_workload

from autotune.device import Device
from autotune.errors import TrialServerError
from autotune.runner import LocalRunner
from autotune.runner.ending import tail
from autotune.trial import Completed, Document, Failed


def server() -> int:
    """The process id of the one server that stands in."""
    assert wait_until(lambda: bool(processes_named("stand_in_server", children(os.getpid()))))
    (pid,) = processes_named("stand_in_server", children(os.getpid()))
    return pid


def descendants_in(log: Path) -> list[int]:
    return [int(pid) for pid in re.findall(r"descendant (\d+)", log.read_text())]


@pytest.mark.parametrize(
    ("behaviour", "reason", "message"),
    [
        ("exit 3", "error", "last words"),
        ("raise", "error", "RuntimeError: raised in the trial"),
        ("exit 0", "error", "last words"),
        ("signal SIGKILL", "killed", "killed by SIGKILL, perhaps by the kernel"),
        ("signal SIGSEGV", "killed", "killed by SIGSEGV"),
        ("signal SIGTERM", "killed", "killed by SIGTERM"),
        ("signal SIGABRT", "killed", "killed by SIGABRT"),
        ("write garbage", "malformed", "'garbage'"),
        ("write 5", "malformed", "'5'"),
        ("write null", "malformed", "'null'"),
        ('write {"result":{"state":"splendid"}}', "malformed", "unknown state 'splendid'"),
        ('write {"result":{"state":"completed"}}', "malformed", "malformed outcome"),
        ('write {"result":7}', "malformed", "malformed outcome"),
        ("half", "error", "its process ended with exit code 0"),
        ("close", "error", "its process ended with exit code 0"),
    ],
)
def test_how_a_trial_may_end(
    stand_in_runner: LocalRunner, tmp_path: Path, behaviour: str, reason: str, message: str
) -> None:
    outcome = run_trial(stand_in_runner, behaviour, log_path=tmp_path / "trial.log")
    assert isinstance(outcome, Failed)
    assert (outcome.reason, message in outcome.message) == (reason, True), outcome
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_a_failure_says_what_was_under_way(stand_in_runner: LocalRunner) -> None:
    for behaviour in ("signal SIGSEGV", "raise"):
        outcome = run_trial(stand_in_runner, behaviour)
        assert isinstance(outcome, Failed)
        assert outcome.during == "train"


def test_a_result_counts_whatever_happens_after_it(stand_in_runner: LocalRunner) -> None:
    assert isinstance(run_trial(stand_in_runner, "complete, signal SIGSEGV"), Completed)
    assert isinstance(run_trial(stand_in_runner, "complete, hang", timeout_seconds=0.5), Completed)


@pytest.mark.parametrize("behaviour", ["hang", "close, hang", "descend, hang"])
def test_a_trial_that_hangs_is_ended_at_its_time_limit(
    stand_in_runner: LocalRunner, tmp_path: Path, behaviour: str
) -> None:
    outcome = run_trial(stand_in_runner, behaviour, timeout_seconds=0.5, log_path=tmp_path / "trial.log")
    assert outcome == Failed("timeout", "stopped after the time limit of 0.5 s", "train")
    assert all_gone(descendants_in(tmp_path / "trial.log"))
    assert children(server()) == []
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_much_output_goes_to_the_log_and_blocks_nothing(stand_in_runner: LocalRunner, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"
    assert isinstance(run_trial(stand_in_runner, "chatter, complete", log_path=log), Completed)
    # Cut down to its end whenever it has grown too long.
    assert 0 < log.stat().st_size <= 16 * 1024**2
    assert log.read_text().startswith("[autotune left out ")
    assert log.read_text().endswith("x\n")


def test_progress_comes_in_order_and_complete(stand_in_runner: LocalRunner) -> None:
    records: list[Document] = []
    # More than a pipe holds.
    assert isinstance(run_trial(stand_in_runner, "progress 5000, complete", progress=records.append), Completed)
    assert records == [{"phase": "train"}, *({"step": step} for step in range(5000))]


def test_descendants_of_a_trial_end_with_it(stand_in_runner: LocalRunner, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"
    assert isinstance(run_trial(stand_in_runner, "descend, complete", log_path=log), Completed)
    pids = descendants_in(log)
    assert len(pids) == 2
    assert all_gone(pids)


def test_closing_in_the_middle_of_a_trial_leaves_no_process(stand_in_runner: LocalRunner, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"

    def stop_once_there_are_descendants(record: Document) -> None:
        if "step" in record:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(stand_in_runner, "descend, progress 1, hang", log_path=log, progress=stop_once_there_are_descendants)
    pids = descendants_in(log)
    assert len(pids) == 2
    assert all_gone(pids)
    assert processes_named("stand_in_server", children(os.getpid())) == []
    # It is not left half way: the next trial has a server of its own.
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_a_server_that_is_killed_loses_its_trial_and_no_other(stand_in_runner: LocalRunner, tmp_path: Path) -> None:
    def kill_server(record: Document) -> None:
        (trial,) = children(server())
        os.kill(server(), signal.SIGKILL)
        # The runner waits for this function: the trial ends without its help.
        assert all_gone([trial])

    outcome = run_trial(stand_in_runner, "hang", progress=kill_server, log_path=tmp_path / "trial.log")
    assert outcome == Failed("lost", "the trial server died during the trial", "train")
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_a_server_that_dies_between_two_trials_loses_none(stand_in_runner: LocalRunner) -> None:
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)
    first = server()
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(first))
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)
    assert server() != first


def test_a_server_that_is_asked_to_end_takes_its_trial_along(stand_in_runner: LocalRunner, tmp_path: Path) -> None:
    def ask(record: Document) -> None:
        if "step" in record:
            os.kill(server(), signal.SIGTERM)

    log = tmp_path / "trial.log"
    outcome = run_trial(stand_in_runner, "descend, progress 1, hang", progress=ask, log_path=log)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "lost"
    assert all_gone(descendants_in(log))


def test_a_stopped_server_is_given_up_and_killed(stand_in_runner: LocalRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.runner.local._GRACE_SECONDS", 0.5)
    monkeypatch.setattr("autotune.runner.local._LEAVE_SECONDS", 0.5)
    run_trial(stand_in_runner, "complete")
    stopped = server()
    os.kill(stopped, signal.SIGSTOP)
    outcome = run_trial(stand_in_runner, "complete", timeout_seconds=0.5)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "lost"
    assert all_gone([stopped])


def test_closing_does_not_wait_for_imports(
    stand_in: None, cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_IMPORT_SECONDS", "300")
    monkeypatch.setattr("autotune.runner.local._LEAVE_SECONDS", 100.0)
    started = time.monotonic()
    with LocalRunner(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        pid = server()
    assert all_gone([pid])
    assert time.monotonic() - started < 60
    runner.close()


def test_a_server_that_cannot_start_says_why(cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho the loader is broken >&2\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with LocalRunner(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        for question in (runner.inspect, lambda: run_trial(runner)):
            with pytest.raises(TrialServerError, match=r"did not start: .*the loader is broken") as raised:
                question()
            assert str(tmp_path / "logs" / "server.log") in raised.value.hint


def test_a_missing_package_is_named(cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        LocalRunner(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner,
        pytest.raises(TrialServerError, match="cannot import what it needs: ImportError: libcudart") as raised,
    ):
        runner.inspect()
    assert "install torch" in raised.value.hint


def test_two_runners_at_once_do_not_meet(stand_in: None, cpu: Device, tmp_path: Path) -> None:
    outcomes: dict[int, list[object]] = {0: [], 1: []}

    def search(number: int) -> None:
        with LocalRunner(cpu, tiny_workload("bert-tiny"), tmp_path / f"logs-{number}") as runner:
            for behaviour in ("complete", "signal SIGKILL", "descend, complete", "chatter, complete") * 2:
                outcome = run_trial(runner, behaviour, log_path=tmp_path / f"trial-{number}.log")
                outcomes[number].append(outcome.state)

    threads = [threading.Thread(target=search, args=(number,)) for number in outcomes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outcomes[0] == outcomes[1] == ["completed", "failed", "completed", "completed"] * 2


def test_no_file_descriptors_leak(stand_in: None, cpu: Device, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with LocalRunner(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
            run_trial(runner, "complete")
            os.kill(server(), signal.SIGKILL)
            run_trial(runner, "complete")
    assert len(os.listdir("/proc/self/fd")) == before


def test_tail() -> None:
    assert tail("/no/such/file") == ""


@pytest.mark.parametrize(
    ("text", "words"), [("", ""), ("one\n\n  two \n\n", "one | two"), ("1\n2\n3\n4\n", "2 | 3 | 4"), ("\xff", "ÿ")]
)
def test_tail_of_a_log(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "log").write_text(text, encoding="utf-8")
    assert tail(tmp_path / "log") == words
