"""Run trials as processes, from the parent's side: executors, the trial server's client, the GPU monitor."""

from autotune.execution.executor import Executor, LocalExecutor, TrialJob, run_trial
from autotune.execution.server_process import WarmServer
from autotune.execution.trial_server import TrialServer

__all__ = ["Executor", "LocalExecutor", "TrialJob", "TrialServer", "WarmServer", "run_trial"]
