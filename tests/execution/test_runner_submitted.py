"""Test jobs beside the trials: their ends are reported, and neither disturbs the other."""

import os
import re
import signal
from pathlib import Path

import pytest
from processes import all_gone, children, is_alive, processes_named, wait_until
from run_trial import run_trial

from autotune.core.candidate import Arm
from autotune.core.device import Chip
from autotune.core.messages import Answer, Job
from autotune.core.outcome import Completed
from autotune.core.prediction import PredictionWork
from autotune.core.schema import encode
from autotune.execution import TrialServer

WORK = PredictionWork(Arm(), Chip(), 1, 1, (), None)


def answers_of_next(runner: TrialServer, count: int) -> dict[str, Answer]:
    """The next ``count`` jobs that end."""
    found: dict[str, Answer] = {}

    def enough() -> bool:
        found.update(runner.ended(0.2))
        return len(found) >= count

    assert wait_until(enough, 60)
    return found


def test_a_submitted_job_tells_its_result_once(stand_in_runner: TrialServer) -> None:
    assert stand_in_runner.ended() == {}
    stand_in_runner.submit("complete", WORK, 30)
    answer = answers_of_next(stand_in_runner, 1)["complete"]
    assert answer.result["state"] == "completed"
    assert answer.exit_code == 0
    assert stand_in_runner.ended() == {}


def test_several_run_beside_a_trial(stand_in_runner: TrialServer) -> None:
    for name in ("complete", "signal SIGKILL", "raise"):
        stand_in_runner.submit(name, WORK, 30)
    assert isinstance(run_trial(stand_in_runner, "descend, complete"), Completed)
    answers = answers_of_next(stand_in_runner, 3)
    assert answers["complete"].result is not None
    assert answers["signal SIGKILL"].signal == signal.SIGKILL
    assert (answers["raise"].exit_code, answers["raise"].result) == (1, None)


def test_a_trial_that_ends_with_descendants_spares_the_job_beside_it(
    stand_in_runner: TrialServer, tmp_path: Path
) -> None:
    stand_in_runner.submit("hang", WORK, 300)
    log = tmp_path / "trial.log"
    assert isinstance(run_trial(stand_in_runner, "descend, complete", log_path=log), Completed)
    assert all_gone(int(pid) for pid in re.findall(r"descendant (\d+)", log.read_text()))
    (server,) = processes_named("stand_in_server", children(os.getpid()))
    (beside,) = children(server)
    assert is_alive(beside)
    stand_in_runner.close()
    assert all_gone([server, beside])
    assert stand_in_runner.ended()["hang"].lost is True


def test_a_job_that_the_worker_cannot_read_is_refused(
    stand_in_runner: TrialServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another version, in an environment that was updated under a running search."""
    monkeypatch.setattr(Job, "document", lambda job: {**encode(job), "kind": "dance"})
    stand_in_runner.submit("complete", WORK, 30)
    assert "its kind is 'dance'" in (answers_of_next(stand_in_runner, 1)["complete"].refused or "")


def test_its_time_limit_is_its_own(stand_in_runner: TrialServer) -> None:
    stand_in_runner.submit("hang", WORK, 0.3)
    assert isinstance(run_trial(stand_in_runner, "complete"), Completed)
    assert answers_of_next(stand_in_runner, 1)["hang"].timed_out is True
