"""Run a trial on a server in one call, small and with ample memory where nothing else is said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import AMPLE_BYTES, QUICK

from autotune.core.candidate import Arm, Candidate
from autotune.core.messages import Progress
from autotune.core.outcome import Effort, Outcome
from autotune.execution import TrialJob, TrialServer
from autotune.execution import run_trial as run_on

SMALL = Candidate(Arm(), 4)
LIMITS_SECONDS = (2.0, 20.0, 100.0)
"""Of trials that are to be seen to begin, and then to be ended: the first that is enough for that on a busy machine."""


def run_trial(
    runner: TrialServer,
    name: str = "trial",
    *,
    candidate: Candidate = SMALL,
    effort: Effort = QUICK,
    cap_bytes: int = AMPLE_BYTES,
    timeout_seconds: float = 120.0,
    progress: Callable[[Progress], None] = lambda record: None,
    log_path: Path | None = None,
) -> Outcome:
    """Run one trial to its end; its log is beside the server's unless named."""
    log = log_path or runner.server_log.with_name("trial.log")
    return run_on(runner, TrialJob(name, candidate, cap_bytes, effort, 42, timeout_seconds, str(log)), progress)


def run_to_limit(runner: TrialServer, behaviour: str, steps: int = 0, **options: Any) -> tuple[Outcome, float]:
    """Run a trial that its time limit ends, with a longer one where it ended before so many steps; that limit."""
    for limit_seconds in LIMITS_SECONDS:
        records: list[Progress] = []
        outcome = run_trial(runner, behaviour, timeout_seconds=limit_seconds, progress=records.append, **options)
        if sum(record.phase == "train" or record.step is not None for record in records) > steps:
            break
    return outcome, limit_seconds
