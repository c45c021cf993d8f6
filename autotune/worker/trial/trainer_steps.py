"""Tell a step timer of the steps of a ``Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from autotune.worker.trial.measure import StepTimer


class TrainerSteps(TrainerCallback):  # type: ignore[misc]
    """The callback that hands the steps of a ``Trainer`` to a timer, and stops the training when that has enough."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self._marks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of the first step."""
        self.timer.begin(kwargs.get("optimizer"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell that all batches of a step are there."""
        self._marks = []
        self.timer.step_begins()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell of the end of a micro-step that is not the last."""
        self.timer.micro_step_ends()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the end of the last micro-step and of gradient clipping."""
        self._marks.append(self.timer.mark())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the end of the optimizer's update."""
        self._marks.append(self.timer.mark())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell of the end of a step."""
        self.timer.step_ends((self._marks[0], self._marks[-1]))
        control.should_training_stop |= self.timer.is_finished

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell that the data has ended."""
        self.timer.end()
