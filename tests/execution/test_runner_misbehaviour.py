"""Test misbehaving trial processes: each becomes an outcome, and nothing of it is left."""

import dataclasses
import json
import os
import re
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import all_gone, children, is_alive, processes_named, wait_until
from run_trial import LIMITS_SECONDS, run_to_limit, run_trial
from tiny import tiny_workload

from autotune.core.candidate import Arm
from autotune.core.dataset_spec import DataSpec
from autotune.core.device import Chip, Device
from autotune.core.errors import TrialServerError
from autotune.core.messages import Answer, Progress
from autotune.core.outcome import Completed, Effort, Failed
from autotune.core.placement import Placement
from autotune.core.prediction import PredictionWork
from autotune.execution import TrialServer, child_process
from autotune.execution.child_process import tail
from autotune.execution.oneshot import run_fresh
from autotune.models.dataset_files import locate


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
        ("write garbage", "malformed", "'garbage'"),
        ("write 5", "malformed", "'5'"),
        ('write {"result":{"state":"splendid"}}', "malformed", "unknown state 'splendid'"),
        ('write {"result":{"state":"completed"}}', "malformed", "malformed Completed"),
        ('write {"progress":5}', "malformed", "not a result: '{\"progress\":5}'"),
        ('write {"result":7}', "malformed", "it is no document"),
        # As the server itself says when a job starts.
        ('write {"started":"x"}', "malformed", 'not a result: \'{"started":"x"}\''),
        ("half", "error", "its process ended with exit code 0"),
        ("close", "error", "its process ended with exit code 0"),
    ],
)
def test_how_a_trial_may_end(
    stand_in_runner: TrialServer, tmp_path: Path, behaviour: str, reason: str, message: str
) -> None:
    outcome = run_trial(stand_in_runner, behaviour, log_path=tmp_path / "trial.log")
    assert (outcome.reason, message in outcome.message) == (reason, True), outcome
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_a_failure_says_what_was_under_way(stand_in_runner: TrialServer) -> None:
    for behaviour in ("signal SIGSEGV", "raise"):
        outcome = run_trial(stand_in_runner, behaviour)
        assert outcome.during == "train"


def test_a_result_counts_whatever_happens_after_it(stand_in_runner: TrialServer) -> None:
    assert isinstance(run_trial(stand_in_runner, "complete, signal SIGSEGV"), Completed)
    assert isinstance(run_to_limit(stand_in_runner, "complete, progress 1, hang", 1)[0], Completed)


@pytest.mark.parametrize("behaviour", ["hang", "close, hang", "descend, hang"])
def test_a_trial_that_hangs_is_ended_at_its_time_limit(
    stand_in_runner: TrialServer, tmp_path: Path, behaviour: str
) -> None:
    outcome, limit_seconds = run_to_limit(stand_in_runner, behaviour, log_path=tmp_path / "trial.log")
    why = f"stopped after the time limit of {limit_seconds:.0f} s, before its first step ended; "
    assert outcome == Failed("timeout", f"{why}--trial-timeout gives it longer", "train")
    assert all_gone(descendants_in(tmp_path / "trial.log"))
    assert children(server()) == []
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_a_trial_that_is_too_slow_says_what_it_would_have_needed(stand_in_runner: TrialServer) -> None:
    effort = Effort(2, busy_steps=1)
    outcome, _ = run_to_limit(stand_in_runner, "progress 2, hang", 2, effort=effort)
    assert isinstance(outcome, Failed)
    assert " with 2 of at least 5 steps done: it would have needed about " in outcome.message


def test_much_output_goes_to_the_log_and_blocks_nothing(stand_in_runner: TrialServer, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"
    assert isinstance(run_trial(stand_in_runner, "chatter, complete", log_path=log), Completed)
    # Cut down to its end whenever it has grown too long.
    assert 0 < log.stat().st_size <= 16 * 1024**2
    assert log.read_text().startswith("[autotune left out ")
    assert log.read_text().endswith("x\n")


def test_progress_comes_in_order_and_complete(stand_in_runner: TrialServer) -> None:
    records: list[Progress] = []
    # More than a pipe holds.
    assert isinstance(run_trial(stand_in_runner, "progress 5000, complete", progress=records.append), Completed)
    assert records == [Progress("train"), *(Progress(step=step) for step in range(5000))]


def test_descendants_of_a_trial_end_with_it(stand_in_runner: TrialServer, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"
    assert isinstance(run_trial(stand_in_runner, "descend, complete", log_path=log), Completed)
    pids = descendants_in(log)
    assert len(pids) == 2
    assert all_gone(pids)


def test_closing_in_the_middle_of_a_trial_leaves_no_process(stand_in_runner: TrialServer, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"

    def stop_once_there_are_descendants(record: Progress) -> None:
        if record.step is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(stand_in_runner, "descend, progress 1, hang", log_path=log, progress=stop_once_there_are_descendants)
    pids = descendants_in(log)
    assert len(pids) == 2
    assert all_gone(pids)
    assert processes_named("stand_in_server", children(os.getpid())) == []
    # It is not left half way: the next trial has a server of its own.
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_a_server_that_is_killed_loses_its_trial_and_no_other(stand_in_runner: TrialServer, tmp_path: Path) -> None:
    def kill_server(record: Progress) -> None:
        (trial,) = children(server())
        os.kill(server(), signal.SIGKILL)
        # The runner waits for this function: the trial ends without its help.
        assert all_gone([trial])

    outcome = run_trial(stand_in_runner, "hang", progress=kill_server, log_path=tmp_path / "trial.log")
    assert outcome == Failed("lost", "the trial server died during the trial", "train")
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_a_server_that_dies_between_two_trials_loses_none(stand_in_runner: TrialServer) -> None:
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)
    first = server()
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(first))
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)
    assert server() != first


def test_a_server_that_is_asked_to_end_takes_its_trial_along(stand_in_runner: TrialServer, tmp_path: Path) -> None:
    def ask(record: Progress) -> None:
        if record.step is not None:
            os.kill(server(), signal.SIGTERM)

    log = tmp_path / "trial.log"
    outcome = run_trial(stand_in_runner, "descend, progress 1, hang", progress=ask, log_path=log)
    assert outcome.reason == "lost"
    assert all_gone(descendants_in(log))


def test_a_stopped_server_is_given_up_and_killed(stand_in_runner: TrialServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.execution.server_process._GRACE_SECONDS", 0.5)
    monkeypatch.setattr("autotune.execution.server_process.LEAVE_SECONDS", 0.5)
    run_trial(stand_in_runner, "complete")
    stopped = server()
    os.kill(stopped, signal.SIGSTOP)
    outcome = run_trial(stand_in_runner, "complete", timeout_seconds=0.5)
    assert outcome.reason == "lost"
    assert all_gone([stopped])


def test_closing_does_not_wait_for_imports(
    stand_in: None, cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each for longer than a test may take.
    monkeypatch.setenv("STAND_IN_IMPORT_SECONDS", "3000")
    monkeypatch.setattr("autotune.execution.server_process.LEAVE_SECONDS", 3000.0)
    with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        pid = server()
    assert all_gone([pid])
    runner.close()


def test_a_server_that_cannot_start_says_why(cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho the loader is broken >&2\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        for question in (runner.inspect, lambda: run_trial(runner)):
            with pytest.raises(TrialServerError, match=r"did not start: .*the loader is broken") as raised:
                question()
            assert str(tmp_path / "logs" / "server.log") in raised.value.hint


@pytest.mark.parametrize(
    ("package", "raises", "message", "hint"),
    [
        ("torch", "ImportError('libcudart.so.13: no such file')", "cannot import what it needs: ImportError: libcudart",
         "install torch"),
        # What transformers makes of it hides both.
        ("accelerate", "RuntimeError('operator accelerate::nms does not exist')",
         "RuntimeError: operator accelerate::nms does not exist", "install another version of accelerate, or remove"),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_or_does_not_fit_is_named_with_its_own_error(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, raises: str, message: str, hint: str
) -> None:
    folder = tmp_path / "site-packages" / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"raise {raises}\n")
    monkeypatch.syspath_prepend(folder.parent)
    with (
        TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner,
        pytest.raises(TrialServerError, match=message) as raised,
    ):
        runner.inspect()
    assert hint in raised.value.hint


def test_facts_of_another_version_are_an_error_in_one_line(stand_in: None, cpu: Device, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    spec = DataSpec(*locate(str(tmp_path / "data.jsonl"), None))
    with TrialServer(cpu, dataclasses.replace(tiny_workload("bert-tiny"), data=spec), tmp_path / "logs") as runner:
        with pytest.raises(TrialServerError, match="the data could not be read: malformed DataFacts") as raised:
            runner.read_data(tmp_path / "read")
        assert str(tmp_path / "logs" / "read_data.log") in raised.value.hint


def test_two_runners_at_once_do_not_meet(stand_in: None, cpu: Device, tmp_path: Path) -> None:
    outcomes: dict[int, list[object]] = {0: [], 1: []}

    def search(number: int) -> None:
        with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / f"logs-{number}") as runner:
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
        with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
            run_trial(runner, "complete")
            os.kill(server(), signal.SIGKILL)
            run_trial(runner, "complete")
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_file_descriptor_leaks_where_no_server_can_be_started(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    runner = TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path, on_start=lambda: None)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TrialServerError, match="no process for trials can be started: No such file") as raised:
        runner.start()
    assert "/no/such/python" in raised.value.hint
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_config_may_be_longer_than_an_argument(stand_in: None, cpu: Device, tmp_path: Path) -> None:
    plain = tiny_workload("bert-tiny")
    labels = {str(number): f"label {number}: something with a rather long name" for number in range(21_841)}
    workload = dataclasses.replace(plain, config={**plain.config, "id2label": labels})
    assert len(json.dumps(workload.document())) > 1_000_000
    with TrialServer(cpu, workload, tmp_path) as runner:
        assert isinstance(run_trial(runner, "complete"), Completed)


def test_file_descriptors_may_have_any_number(stand_in: None, cpu: Device, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 22_000 if hard == resource.RLIM_INFINITY else min(22_000, hard - 100)
    if wanted < 1024:
        pytest.skip("fewer than 1,024 files can be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted + 100, hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < wanted:
            opened.append(os.dup(opened[0]))
        with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path) as runner:
            assert isinstance(run_trial(runner, "complete"), Completed)
        echo = tmp_path / "answering.py"
        echo.write_text("import os, sys\nos.write(int(sys.argv[1]), sys.stdin.readline().encode())\n")
        work = {"weights": None}
        with pytest.MonkeyPatch.context() as patch:
            interpreter = tmp_path / "echo"
            interpreter.write_text(f'#!/bin/sh\nexec python3 "{echo}" "$4"\n')
            interpreter.chmod(0o755)
            patch.setattr(sys, "executable", str(interpreter))
            answer = run_fresh("any", work, dict, Placement.of(cpu), tmp_path / "fresh.log", 60.0, offline=True)
            assert answer["work"] == work
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_time_limits_hold_while_nobody_reads(stand_in_runner: TrialServer) -> None:
    # More than the pipe holds, and none of it is read. Whoever looks seldom may miss the process that is there for 2 s.
    stand_in_runner.submit("progress 20000, hang", PredictionWork(Arm(), Chip(), 1, 1, (), None), LIMITS_SECONDS[0])
    wait_until(lambda: bool(children(server())), 10)
    assert wait_until(lambda: not children(server()), 60)
    ended: dict[str, Answer] = {}
    assert wait_until(lambda: bool(ended.update(stand_in_runner.ended(0.1)) or ended), 60)
    assert [answer.timed_out for answer in ended.values()] == [True]
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)


def test_an_inspection_that_takes_too_long_is_not_repeated(
    stand_in: None, cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_INSPECTIONS", str(tmp_path / "inspections"))
    with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        for limit_seconds in LIMITS_SECONDS:
            with pytest.raises(TrialServerError, match="not be inspected: it was still at work when its time limit"):
                runner.inspect(limit_seconds)
            if (tmp_path / "inspections").exists():
                break
    assert (tmp_path / "inspections").read_text() == "one\n"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, as the server finds it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_no_file_is_left_of_a_trial_however_it_ends(
    stand_in: None, temporary: Path, cpu: Device, tmp_path: Path
) -> None:
    with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        for behaviour in ("litter, hang", "litter, signal SIGKILL", "litter, descend, exit 1", "litter, complete"):
            run_trial(runner, behaviour, timeout_seconds=0.5 if "hang" in behaviour else 60.0)
            assert list(temporary.iterdir()) == [], behaviour
        with pytest.raises(KeyboardInterrupt):
            run_trial(runner, "litter, progress 1, hang", progress=_interrupt)
        assert list(temporary.iterdir()) == []
        run_trial(runner, "litter, progress 1, hang", progress=_kill_server)
    assert list(temporary.iterdir()) == []


def _kill_server(record: Progress) -> None:
    if record.step is not None:
        os.kill(server(), signal.SIGKILL)


def _interrupt(record: Progress) -> None:
    if record.step is not None:
        raise KeyboardInterrupt


def test_a_folder_for_temporary_files_may_vanish(stand_in: None, temporary: Path, cpu: Device, tmp_path: Path) -> None:
    with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        assert isinstance(run_trial(runner, "litter, complete"), Completed)
        temporary.rmdir()
        assert isinstance(run_trial(runner, "litter, complete"), Completed)


def test_where_no_temporary_file_can_be_made_a_trial_says_so(
    stand_in: None, cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_NO_TEMPORARY", "1")
    with TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path / "logs") as runner:
        outcome = run_trial(runner, "complete")
        assert isinstance(outcome, Failed)
        assert outcome.message.startswith("no temporary folder can be made: ")
        assert outcome.message.endswith("; set TMPDIR to a folder that can be written")
        with pytest.raises(TrialServerError, match="could not be inspected: no temporary folder can be made"):
            runner.inspect(60.0)


@pytest.mark.parametrize(
    ("text", "words"), [("", ""), ("one\n\n  two \n\n", "one | two"), ("1\n2\n3\n4\n", "2 | 3 | 4"), ("\xff", "ÿ")]
)
def test_tail_of_a_log(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "log").write_text(text, encoding="utf-8")
    assert tail(tmp_path / "log") == words
    assert tail("/no/such/file") == ""


def test_a_process_whose_start_is_interrupted_is_killed(
    monkeypatch: pytest.MonkeyPatch, cpu: Device, tmp_path: Path
) -> None:
    """Ctrl-C may come when the process runs and before its id is known."""
    started: list[int] = []

    class Interrupted(child_process.Popen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)
            del self.pid
            signal.raise_signal(signal.SIGINT)
            self.pid = started[0]

    monkeypatch.setattr(child_process, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), TrialServer(cpu, tiny_workload("bert-tiny"), tmp_path):
        pytest.fail("the signal is raised at the start")
    assert len(started) == 1
    assert not is_alive(started[0])
