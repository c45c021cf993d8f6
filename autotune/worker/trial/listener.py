"""Define the events of a training, without torch."""

from __future__ import annotations

from typing import Any

ShapesByPlace = dict[str, tuple[int, ...]]
"""The shapes of the tensors that a model is called with, then lengths of rows, by where they stand: ``1.input_ids``;
then the shapes of those that it returns: ``out.logits``."""


class Listener:
    """Receives the events of a training as they happen; each method does nothing unless it is overridden."""

    def call_begins(self, *, trains: bool) -> None:
        """Handle a call of an outermost module with parameters; ``trains`` if it computes gradients."""

    def call_ends(self, called: Any, shapes: ShapesByPlace, *, trains: bool) -> None:
        """Handle the end of such a call, with the shapes of inputs and outputs."""

    def backward_begins(self, tensors: Any) -> None:
        """Handle the start of a backward pass from these tensors."""

    def backward_ends(self) -> None:
        """Handle the end of a backward pass."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """Handle the start of an optimizer's step."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """Handle the end of an optimizer's step."""


class StepListener:
    """Receives the events of a training's steps; each method does nothing unless it is overridden."""

    def begin(self) -> None:
        """Prepare for the first batch."""

    def step_begins(self) -> None:
        """Handle the arrival of a step's first batch."""

    def micro_step_ends(self) -> None:
        """Handle the end of a micro-step that is not the last of its step."""

    def step_ends(self, marks: tuple[Any, Any], wait_seconds: float | None = None) -> None:
        """Handle the end of a whole step; ``marks`` are from before and after its optimizer step.

        ``wait_seconds`` is the time spent waiting for batches after the first; ``None`` where all came before it.
        """

    def step_is_dropped(self) -> None:
        """Handle the end of a step that does not count."""

    def mark(self) -> Any:
        """Mark this point on the device's timeline."""
