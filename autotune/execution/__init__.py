"""Run trials as processes, from the parent's side: executors, the trial server's client, the GPU monitor."""

from autotune.execution.executor import Executor, LocalExecutor, TrialJob, run_trial
from autotune.execution.trial_server import TrialServer
from autotune.execution.warm_server import WarmServer

__all__ = ["Executor", "LocalExecutor", "TrialJob", "TrialServer", "WarmServer", "run_trial"]
