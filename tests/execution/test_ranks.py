"""Test trials of several ranks: real ones that train together on the CPU, and ranks that misbehave."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import all_gone, children
from run_trial import run_to_limit, run_trial
from tiny import ENDLESS, tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.device import Device
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, Effort, Failed, OutOfMemory
from autotune.core.placement import Placement, rank_log
from autotune.core.rehearsal import Rehearsal, RehearsalWork
from autotune.core.training_source import find_script
from autotune.core.units import MIB
from autotune.core.workload import Workload
from autotune.execution import TrialServer

LONG_RUNS = Path(__file__).resolve().parents[1] / "own_code" / "long_runs.py"
TOGETHER = Arm(strategy="ddp", ranks=2)


def under_way(server: TrialServer) -> list[int]:
    """The ranks that the server runs."""
    return children(server._server.pid)


@pytest.fixture
def ranks(stand_in: None, cpu: Device, tmp_path: Path) -> Iterator[TrialServer]:
    """A server whose jobs have two ranks, which behave as the job's id says."""
    with TrialServer(Placement.of(cpu, cpu), tiny_workload("bert-tiny"), tmp_path / "logs") as server:
        yield server


@pytest.mark.parametrize(
    ("behaviour", "reason", "message"),
    [
        ("hang | signal SIGKILL", "killed", "rank 1: killed by SIGKILL"),
        ("signal SIGSEGV | hang", "killed", "rank 0: killed by SIGSEGV"),
        ("hang | exit 0", "error", "rank 1: its process ended with exit code 0; its last words: last words"),
        ("complete | exit 3", "error", "rank 1: its process ended with exit code 3"),
        ("complete | raise", "error", "rank 1: its process ended with exit code 1"),
        ("hang | write garbage", "malformed", "rank 1: not a result: 'garbage'"),
        ('hang | write {"result":{"state":"splendid"}}', "malformed", "unknown state 'splendid'"),
        ('complete | write {"result":7}', "malformed", "it is no document"),
        ("hang | fail disconnected", "error", "rank 1: disconnected"),
        # What follows from another rank's end is not blamed.
        ("await, gone, fail disconnected, hang | mark, signal SIGKILL", "killed", "rank 1: killed by SIGKILL"),
        ("await, fail disconnected | fail first, mark, hang", "error", "rank 1: first"),
    ],
)
def test_a_rank_that_fails_fails_the_trial_and_ends_the_others(
    ranks: TrialServer, tmp_path: Path, behaviour: str, reason: str, message: str
) -> None:
    outcome = run_trial(ranks, behaviour, log_path=tmp_path / "trial.log")
    assert isinstance(outcome, Failed)
    assert (outcome.reason, message in outcome.message) == (reason, True), outcome
    assert under_way(ranks) == []
    assert isinstance(run_trial(ranks, "complete | complete"), Completed)


def test_out_of_memory_of_one_rank_is_the_trials(ranks: TrialServer) -> None:
    for behaviour in ("hang | oom", "await, fail disconnected | oom, mark, hang", "oom, hang | complete"):
        outcome = run_trial(ranks, behaviour)
        assert isinstance(outcome, OutOfMemory), outcome
        assert outcome.message.endswith(": no memory")
    assert under_way(ranks) == []


@pytest.mark.whole
def test_ranks_that_hang_are_ended_at_the_time_limit(ranks: TrialServer, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"
    for behaviour in ("hang | hang", "complete | hang", "descend, hang | hang"):
        outcome, limit_seconds = run_to_limit(ranks, behaviour, log_path=log)
        why = f"stopped after the time limit of {limit_seconds:.0f} s, before its first step ended; "
        assert outcome == Failed("timeout", f"{why}--trial-timeout gives it longer", "train")
    assert all_gone([int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("descendant")])
    assert under_way(ranks) == []


def test_ranks_find_the_variables_of_torchrun(ranks: TrialServer, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"
    records: list[Progress] = []
    run_trial(ranks, "variables, complete | variables, complete", log_path=log, progress=records.append)
    told = [json.loads(Path(rank_log(str(log), rank)).read_text()) for rank in (0, 1)]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in told] == [("0", "0"), ("1", "1")]
    assert all(each["WORLD_SIZE"] == "2" and each["OMP_NUM_THREADS"] == "1" for each in told)
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"] == "4711"
    # Of the first rank only.
    assert records == [Progress("train")]


@pytest.fixture(scope="module")
def trainers(cpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialServer]:
    """A server whose trials are two ranks of a real Trainer."""
    placement = Placement.of(cpu, cpu)
    # Large enough that memory runs out for tensors, not for threads, under a small limit.
    workload = tiny_workload("bert-tiny", config={"vocab_size": 30522})
    with TrialServer(placement, workload, tmp_path_factory.mktemp("logs")) as server:
        yield server


def test_two_ranks_train_together_and_are_measured_as_one(trainers: TrialServer, tmp_path: Path) -> None:
    log = tmp_path / "trial.log"
    effort = Effort(warmup_steps=1, min_steps=2, max_steps=3, max_seconds=100.0)
    outcome = run_trial(trainers, candidate=Candidate(TOGETHER, 2, 5), effort=effort, log_path=log)
    assert isinstance(outcome, Completed), (outcome, log.read_text())
    measured = outcome.measurement
    assert measured.ranks == 2
    # Of all ranks: 2 × 5 × 2.
    assert measured.samples_per_second == pytest.approx(20 / measured.step_seconds)
    assert measured.micro_steps_run == 3
    assert measured.micro_step_seconds is not None
    # Two of the five micro-steps were added up, and they exchange no gradients.
    assert measured.step_seconds > 2 * measured.micro_step_seconds
    assert "train_runtime" in log.read_text()
    assert Path(rank_log(str(log), 1)).exists()


def test_ranks_out_of_memory_leave_the_server_fit(trainers: TrialServer) -> None:
    outcome = run_trial(trainers, cap_bytes=4 * MIB)
    assert isinstance(outcome, OutOfMemory), outcome
    assert under_way(trainers) == []


def test_a_rank_that_is_killed_in_full_swing_ends_the_trial(trainers: TrialServer) -> None:
    def kill(record: Progress) -> None:
        if record.step == 2:
            os.kill(max(under_way(trainers)), 9)

    outcome = run_trial(trainers, effort=ENDLESS, progress=kill)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "killed"
    assert "rank 1: killed by SIGKILL" in outcome.message
    assert under_way(trainers) == []


@pytest.mark.whole
def test_four_ranks_train_together_are_as_slow_as_the_slowest_and_end_with_one_that_is_killed(
    cpu: Device, tmp_path: Path
) -> None:
    candidate = Candidate(Arm(strategy="ddp", ranks=4), 2, 3)
    with TrialServer(Placement.of(*[cpu] * 4), tiny_workload("bert-tiny"), tmp_path / "logs") as server:

        def kill(record: Progress) -> None:
            if record.step == 2:
                os.kill(max(under_way(server)), 9)

        def delay(record: Progress) -> None:
            if record.step == 2:
                slow = max(under_way(server))
                os.kill(slow, signal.SIGSTOP)
                threading.Timer(3.0, os.kill, (slow, signal.SIGCONT)).start()

        effort = Effort(warmup_steps=1, min_steps=2, max_steps=2, max_seconds=100.0)
        outcome = run_trial(server, candidate=candidate, effort=effort, timeout_seconds=200.0)
        assert isinstance(outcome, Completed), outcome
        assert outcome.measurement.ranks == 4
        assert outcome.measurement.samples_per_second == pytest.approx(24 / outcome.measurement.step_seconds)
        slowed = run_trial(server, candidate=candidate, effort=effort, progress=delay, timeout_seconds=200.0)
        assert isinstance(slowed, Completed), slowed
        # The step of all is that of the slowest: one of the two that are timed took three seconds longer.
        assert slowed.measurement.step_seconds > outcome.measurement.step_seconds + 1.0
        ended = run_trial(server, candidate=candidate, effort=ENDLESS, progress=kill, timeout_seconds=200.0)
        assert isinstance(ended, Failed)
        assert "rank 3: killed by SIGKILL" in ended.message
        assert under_way(server) == []


def rehearsal_of(server: TrialServer, cap_bytes: int, **changes: Any) -> Rehearsal:
    """What two ranks find of what comes after their first steps."""
    devices = Placement.of(*server.placement.devices).rank_devices
    line_bytes = int(cap_bytes * 0.97)
    return server.rehearse(RehearsalWork(Candidate(TOGETHER, 8), devices, cap_bytes, line_bytes, 42, **changes), 200.0)


def test_a_model_by_name_evaluates_and_saves_on_all_ranks(trainers: TrialServer) -> None:
    found = rehearsal_of(trainers, 4000 * MIB)
    assert (found.problem, found.unknown, found.alarms) == (None, (), [])
    assert (found.evaluation.batch, found.evaluation.batches_run, found.evaluation.samples) == (8, 2, 32)
    assert (found.saving.ranks, found.saving.is_computed) == (2, False)
    assert len(found.sentences) == 2
    assert under_way(trainers) == []
    assert re.match("rank [01]: ", rehearsal_of(trainers, MIB).problem)


@pytest.mark.parametrize(
    ("name", "batches"),
    [("logits", {None: "of which .* are outputs"}), ("batch", {None: "512 are out of memory", 16: ""})],
)
def test_a_trainer_of_ones_own_is_rehearsed_on_all_ranks(
    cpu: Device, tmp_path: Path, name: str, batches: dict[int | None, str]
) -> None:
    source = find_script(("python", str(LONG_RUNS), name), ranks=2)
    with TrialServer(Placement.of(cpu, cpu), Workload.of_source(source), tmp_path / "logs") as server:
        for batch, told in batches.items():
            found = rehearsal_of(server, (400 if name == "logits" else 200) * MIB, evaluation_batch=batch, seconds=2.0)
            assert under_way(server) == []
            assert found.problem is None, (tmp_path / "logs" / "rehearsal.log").read_text()
            assert (found.failed_rank is not None) == ("out of memory" in told)
            assert bool(found.alarms) == bool(told)
            assert re.search(told, "\n".join(found.alarms))
