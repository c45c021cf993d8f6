"""Define what is told of a training as it goes on, without torch."""

from __future__ import annotations

from typing import Any

ShapesByPlace = dict[str, tuple[int, ...]]
"""The shapes of the tensors that a model is called with, by where they stand: ``0``, ``1.input_ids``."""


class Listener:
    """What is told of a training as it goes on; it does nothing with it."""

    def call_begins(self, *, trains: bool) -> None:
        """Take in a call of an outermost module with parameters; one that ``trains`` computes gradients."""

    def call_ends(self, called: Any, shapes: ShapesByPlace, result: Any, *, trains: bool) -> None:
        """Take in the end of such a call, the shapes that went in, and what came out."""

    def backward_begins(self, tensors: Any) -> None:
        """Take in the start of a backward pass, with what it begins from."""

    def backward_ends(self) -> None:
        """Take in the end of a backward pass."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """Take in the start of an optimizer's step."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """Take in the end of an optimizer's step."""


class StepListener:
    """What is told of the steps of a training; it does nothing with it."""

    def begin(self) -> None:
        """Take in that the first batch is about to be given."""

    def step_begins(self) -> None:
        """Take in that the first batch of a step is there."""

    def micro_step_ends(self) -> None:
        """Take in the end of a micro-step that is not the last of its step."""

    def step_ends(self, marks: tuple[Any, Any], wait_seconds: float | None = None) -> None:
        """Take in the end of a whole step; ``marks`` were made before and after its optimizer's step.

        ``wait_seconds`` is how long batches after the first were waited for; ``None`` where all came before it.
        """

    def step_is_dropped(self) -> None:
        """Take in the end of a step that cannot be counted."""

    def mark(self) -> Any:
        """Mark this point on the device's timeline."""
