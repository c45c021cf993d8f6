"""Run trials as processes, from the parent's side: executors, the trial server's client, the GPU monitor."""

from autotune.execution.executor import Event, Executor, LocalExecutor, TrialJob, run_trial
from autotune.execution.trial_server import TrialServer

__all__ = ["Event", "Executor", "LocalExecutor", "TrialJob", "TrialServer", "run_trial"]
