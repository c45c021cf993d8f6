"""One call that runs a trial on a runner, small and ample where nothing else is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tiny import AMPLE_BYTES, QUICK

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.outcome import Effort, Outcome
from autotune.execution import LocalRunner
from autotune.execution.executor import TrialJob

SMALL = Candidate(Arm(), 4)


def run_trial(
    runner: LocalRunner,
    name: str = "trial",
    *,
    candidate: Candidate = SMALL,
    effort: Effort = QUICK,
    cap_bytes: int = AMPLE_BYTES,
    timeout_seconds: float = 120.0,
    progress: Callable[[Document], None] = lambda record: None,
    log_path: Path | None = None,
) -> Outcome:
    """Run one trial to its end; its log is beside the server's unless named."""
    log = log_path or runner.server_log.with_name("trial.log")
    return runner.run(TrialJob(name, candidate, cap_bytes, effort, 42, timeout_seconds, str(log)), progress)
