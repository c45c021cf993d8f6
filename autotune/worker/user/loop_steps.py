"""Divide a training loop that is no Trainer's into micro-steps and steps.

A micro-step begins when a batch is given and ends when the next is asked for. A step ends with the micro-step in which
the optimizer stepped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from time import perf_counter
from typing import Any

from autotune.worker.arrays import arrays_in
from autotune.worker.trial.training_watch import Listener, StepListener
from autotune.worker.user.code import UserCodeError

# Limits beyond which the code is refused: dropped steps in a row, steps with other micro-steps than asked before a
# whole one, and micro-steps in a row without a backward pass. Choices.
_MOST_DROPPED = 40
_MOST_EARLY = 3
_MOST_WITHOUT_BACKWARD = 50


class StepMarks(Listener):
    """Keeps the last loss of a loop, and marks where a step's backward passes and its update end.

    A mark is a point on the device's timeline, such as a CUDA event.
    """

    def __init__(self, name: str, listener: StepListener) -> None:
        self._name = name
        self._listener = listener
        self._marks: tuple[Any, Any] | None = None
        """Where this step's backward passes and its update end; ``None`` before its first optimizer begins."""
        self.loss: Any = None
        """The tensor from which the last backward pass began, detached; ``None`` before the first pass."""

    def backward_begins(self, tensors: Any) -> None:
        """Record the loss."""
        first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        self.loss = first.detach() if hasattr(first, "detach") else None

    def optimizer_begins(self, optimizer: Any) -> None:
        """Mark the end of the backward pass, before the first of several optimizers."""
        if self._marks is None:
            self.mark_both()

    def mark_both(self) -> None:
        """Mark this point as the end of the backward passes, and for now as the end of the update, too."""
        mark = self._listener.mark()
        self._marks = mark, mark


class LoopSteps(StepMarks):
    """Finds and reports where a loop's micro-steps and steps begin and end; also the listener of ``autotune.steps``."""

    def __init__(
        self,
        name: str,
        accumulation: int | None,
        listener: StepListener,
        *,
        may_skip: bool = False,
        on_begin: Callable[[], None] = lambda: None,
        on_loader: Callable[[Any], None] = lambda _: None,
        on_batch: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Divide a loop into steps; call ``on_loader`` with its loader, then ``on_begin`` before the first batch."""
        super().__init__(name, listener)
        self._on_begin, self._on_loader = on_begin, on_loader
        self._on_batch = on_batch
        """Called with each batch before the loop gets it."""
        self._accumulation = accumulation
        """Micro-steps of a step; ``None``: as many as come before the optimizer steps."""
        self._may_skip = may_skip
        """Whether a gradient scaler may leave an optimizer's step out."""
        self._is_open = False
        self._has_begun = False
        self._micro_steps = 0
        self._backward_passes = 0
        self._wait_seconds = 0.0
        self._usual_samples = 0
        self.is_incomplete = False
        """Whether the step under way has a batch of fewer samples than others, as at the end of an epoch."""
        self._has_stepped = False
        """Whether an optimizer that torch knows has stepped so far."""
        self._whole_steps = 0
        self._dropped_in_row = self._early_steps = self._micro_steps_without_backward = 0

    def backward_begins(self, tensors: Any) -> None:
        """Count the pass and record its loss."""
        self._backward_passes += 1
        super().backward_begins(tensors)

    def optimizer_ends(self, optimizer: Any) -> None:
        """Mark the end of the update; of several optimizers the mark of the last one stays."""
        if self._marks is not None:
            self._marks = self._marks[0], self._listener.mark()
            self._has_stepped = True

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader endlessly, so that the code after the loop is never reached."""
        self._on_loader(loader)
        yield from self.repeated(lambda: iter(loader))

    def repeated(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield batches endlessly; ``make_iterator`` begins an epoch, and returns the iterator over its batches."""
        with self._opened("goes over autotune.steps within autotune.steps", "use it for the training loop alone"):
            while (yield from self._epoch(make_iterator())):
                self.data_is_over()

    @contextlib.contextmanager
    def _opened(self, problem: str, hint: str) -> Iterator[None]:
        """Report the start of the training, and allow no other use of the steps within the block.

        Raises ``UserCodeError`` for a nested use, with ``problem`` and ``hint`` as its texts.
        """
        if self._is_open:
            raise UserCodeError(f"{self._name} {problem}", hint)
        self._is_open = True
        try:
            self.begin()
            yield
        finally:
            self._is_open = False

    def _epoch(self, batches: Iterator[Any]) -> Generator[Any, None, bool]:
        """Yield the batches of an epoch, each as a micro-step; return whether there were any."""
        has_batches = False
        while True:
            asked_at = perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return has_batches
            has_batches = True
            self.micro_step_begins(perf_counter() - asked_at, batch)
            try:
                yield batch
            finally:
                self.micro_step_ends()

    @contextlib.contextmanager
    def micro_step(self) -> Iterator[None]:
        """Treat the block as a micro-step: ``with autotune.step():`` in a loop without ``autotune.steps``."""
        with self._opened("uses autotune.step within autotune.steps or itself", "use one of them, once for each batch"):
            self.micro_step_begins(0.0, None)
            yield
            self.micro_step_ends()

    def begin(self) -> None:
        """Report the start of the training, once."""
        if not self._has_begun:
            self._has_begun = True
            self._on_begin()
            self._listener.begin()

    def micro_step_begins(self, wait_seconds: float, batch: Any) -> None:
        """Begin a micro-step with a batch, or ``None`` where there is none, and add the time waited for it."""
        if batch is not None:
            self._on_batch(batch)
        if self._micro_steps == 0:
            # The listener itself times the wait for a step's first batch.
            self._listener.step_begins()
        else:
            self._wait_seconds += wait_seconds
        if (samples := batch_samples(batch)) is not None:
            self.is_incomplete = self.is_incomplete or samples < self._usual_samples
            self._usual_samples = max(self._usual_samples, samples)

    def micro_step_ends(self) -> None:
        """Report the end of a micro-step, and end the step where it is complete.

        Raises ``UserCodeError`` where too many micro-steps had no backward pass.
        """
        self._micro_steps += 1
        if self._backward_passes == 0:
            self._micro_steps_without_backward += 1
            if self._micro_steps_without_backward >= _MOST_WITHOUT_BACKWARD:
                raise UserCodeError(
                    f"{self._name} made no backward pass in {_MOST_WITHOUT_BACKWARD} batches",
                    "go over autotune.steps(loader) in the training loop alone",
                )
        else:
            self._micro_steps_without_backward = 0
        self._backward_passes = 0
        # Micro-steps are counted where torch does not know the optimizer, or a gradient scaler may skip its step.
        is_counted = not self._has_stepped or self._may_skip
        is_complete = self._accumulation is not None and self._micro_steps >= self._accumulation
        if self._marks is not None or (is_counted and is_complete):
            self._end_step()
        else:
            self._listener.micro_step_ends()

    def _end_step(self) -> None:
        """End a step: report a whole one, and drop one that is incomplete, skipped, or too short or long."""
        is_early = self._accumulation is not None and self._micro_steps != self._accumulation
        was_skipped = self._marks is None and (self._has_stepped or self._may_skip)
        if is_early or was_skipped or self.is_incomplete:
            self._drop(is_early=is_early)
            return
        self._whole_steps += 1
        self._dropped_in_row = self._early_steps = 0
        # An optimizer that torch does not know leaves no marks: all of the step then ends here.
        mark = self._listener.mark() if self._marks is None else None
        marks, wait_seconds = self._marks or (mark, mark), self._wait_seconds
        self._reset()
        self._listener.step_ends(marks, wait_seconds)

    def _drop(self, *, is_early: bool) -> None:
        """Leave a step out of the measurement; ``is_early``: it has other micro-steps than were asked for.

        Raises ``UserCodeError`` after too many dropped steps in a row, or too many early ones before any whole step.
        """
        self._dropped_in_row += 1
        self._early_steps += is_early
        micro_steps = self._micro_steps
        self._reset()
        self._listener.step_is_dropped()
        if self._early_steps > _MOST_EARLY and self._whole_steps == 0:
            raise UserCodeError(
                f"{self._name} steps its optimizer after {micro_steps} batches, asked was {self._accumulation}",
                "have it accumulate as many batches as its gradient_accumulation_steps say",
            )
        if self._dropped_in_row > _MOST_DROPPED:
            raise UserCodeError(f"{self._name} made no whole step of its optimizer in {self._dropped_in_row} steps")

    def data_is_over(self) -> None:
        """Drop the step that the end of the data cut short, if any, and forget the early steps before it."""
        self._early_steps = 0
        if self._micro_steps:
            self._drop(is_early=False)

    def _reset(self) -> None:
        self._micro_steps, self._wait_seconds, self.is_incomplete, self._marks = 0, 0.0, False, None


def batch_samples(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in a batch; ``None`` without one."""
    shape = next((array.shape for array in arrays_in(batch) if len(array.shape)), None)
    return None if shape is None else int(shape[0])
