"""Look at the first step of a training that is for real, by the checks of trials: whether it trains as it was set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from autotune.core.real_training import RealTraining
from autotune.worker.trial.listener import Listener
from autotune.worker.trial.step_checks import NotTrainedError, StepChecks

End = Callable[[str, str], NoReturn]
"""Ends the training, with what is wrong and what to do."""


class FirstStepWatch(Listener):
    """Watches a training up to the first step of its optimizer, and ends it where that is otherwise than it was set."""

    def __init__(self, training: RealTraining, end: End, accumulation: int | None, look: Callable[[], None]) -> None:
        self._training, self._end, self._look = training, end, look
        self._accumulation = accumulation
        """Backward passes of a step; ``None`` where they are not known."""
        self._passes = 0
        # A loop decides itself what a batch of its config is.
        batch = None if training.source.kind == "loop" else training.candidate.per_device_train_batch_size
        self.checks = StepChecks(training.source.name, batch, self._refuse)
        self.checks.watch.listener = self

    def install(self) -> None:
        """Watch from now on."""
        self.checks.watch.install()

    def backward_begins(self, tensors: Any) -> None:
        """Count the pass."""
        self._passes += 1

    def optimizer_ends(self, optimizer: Any) -> None:
        """Judge the step, and watch no longer."""
        if not self._passes:
            return
        wanted, name, arm = self._accumulation, self._training.source.name, self._training.candidate.arm
        # A gradient scaler may have left out steps.
        if (
            wanted is not None
            and self._passes != wanted
            and not (arm.precision == "fp16" and not self._passes % wanted)
        ):
            self._end(
                f"{name} makes {self._passes} backward passes for a step of its optimizer, asked was {wanted}",
                "have it accumulate as many batches as it is told",
            )
        if "precision" in self._training.source.interface.searched and self._training.source.framework != "trainer":
            model = self.checks.watch.model
            self.checks.precision = next(model.parameters()).device.type, arm.precision
        self.checks.judge_first(self._passes)
        self._look()

    def _refuse(self, found: NotTrainedError) -> NoReturn:
        self._end(found.message, found.hint)
