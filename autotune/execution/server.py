"""Define the protocol of a trial server: what a search asks of it besides trials."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from autotune.core.inspection import Inspection
from autotune.core.messages import Answer
from autotune.core.prediction import ArmsToTrace, PredictionWork
from autotune.core.workload import Workload


class Server(Protocol):
    """Answers the questions before the first trial, and predicts beside the trials; see ``TrialServer``."""

    def start(self, *, inspects: bool = False) -> None:
        """Start the server in the background."""

    def read_data(self, folder: Path) -> Workload:
        """Read the workload's data; return the workload with its facts."""

    def discard_data(self) -> None:
        """Remove the data that was read, unless another search uses it."""

    def inspect(self, timeout_seconds: float = ..., arms: ArmsToTrace | None = None) -> Inspection:
        """Return what there is to know of this environment and workload."""

    def run_as_inspected(self, workload: Workload) -> None:
        """Hand trials the workload as its inspection has shown it."""

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start a prediction beside the trials."""

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return the predictions that have ended since the last call."""
