"""Run a trial on a server in one call, small and with ample memory where nothing else is said."""

from collections.abc import Callable
from pathlib import Path

from tiny import AMPLE_BYTES, QUICK

from autotune.core.candidate import Arm, Candidate
from autotune.core.messages import Progress
from autotune.core.outcome import Effort, Outcome
from autotune.execution import TrialJob, TrialServer
from autotune.execution import run_trial as run_on

SMALL = Candidate(Arm(), 4)


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
