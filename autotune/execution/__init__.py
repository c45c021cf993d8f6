"""The parent side of a trial: executors, the client of the trial server, one-off processes, the GPU monitor."""

from autotune.execution.executor import Event, Executor, LocalExecutor, TrialJob, run_trial
from autotune.execution.trial_server import TrialServer

__all__ = ["Event", "Executor", "LocalExecutor", "TrialJob", "TrialServer", "run_trial"]
