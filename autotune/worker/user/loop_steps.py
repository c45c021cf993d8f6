"""Divide a training loop that is no Trainer's into micro-steps and steps, and measure the whole ones.

A micro-step begins when a batch is given and ends when the next is asked for. A step ends with the micro-step in which
the optimizer stepped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from autotune.core.outcome import Measurement
from autotune.worker.trial.listener import Listener
from autotune.worker.trial.measure import MeasureCallback, _Step
from autotune.worker.trial.rehearsal import Rehearsing
from autotune.worker.user.code import UserCodeError

# So many steps that cannot be counted, one after the other, mean that none will come that can.
_MOST_DROPPED = 40
_MOST_EARLY = 3
_MOST_WITHOUT_BACKWARD = 50


class StepListener:
    """What is told of the steps of a loop; it does nothing with it."""

    def begin(self) -> None:
        """Take in that the first batch is about to be given."""

    def step_begins(self) -> None:
        """Take in that the first batch of a step is there."""

    def micro_step_ends(self) -> None:
        """Take in the end of a micro-step that is not the last of its step."""

    def step_ends(self, marks: tuple[Any, Any], wait_seconds: float) -> None:
        """Take in the end of a whole step; ``marks`` were made before and after its optimizer's step."""

    def step_is_dropped(self) -> None:
        """Take in the end of a step that cannot be counted."""

    def mark(self) -> Any:
        """Mark this point on the device's timeline."""


class LoopSteps(Listener):
    """Where the micro-steps and steps of a loop begin and end; also the listener of ``autotune.steps``."""

    def __init__(
        self,
        name: str,
        accumulation: int | None,
        listener: StepListener,
        *,
        may_skip: bool = False,
        rehearsing: Rehearsing | None = None,
        on_batch: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._on_batch = on_batch
        self._accumulation = accumulation
        """Micro-steps of a step; ``None``: as many as come before the optimizer steps."""
        self._listener = listener
        self._may_skip = may_skip
        """Whether a gradient scaler may leave an optimizer's step out."""
        self._rehearsing = rehearsing
        self._is_open = False
        self._has_begun = False
        self._micro_steps = 0
        self._backward_passes = 0
        self._wait_seconds = 0.0
        self._usual_samples = 0
        self._is_short = False
        self._marks: tuple[Any, Any] | None = None
        self._has_stepped = False
        self._whole_steps = 0
        self._dropped = self._early = self._micro_steps_without_backward = 0
        self.loss: Any = None
        """The last one that a backward pass began from."""

    # What the watch tells

    def backward_begins(self, tensors: Any) -> None:
        """Record the loss of a micro-step."""
        self._backward_passes += 1
        first = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        self.loss = first.detach() if hasattr(first, "detach") else None

    def optimizer_begins(self, optimizer: Any) -> None:
        """Mark the end of the backward pass; of several optimizers the first counts."""
        if self._marks is None:
            mark = self._listener.mark()
            self._marks = mark, mark

    def backward_within_step_ends(self) -> None:
        """Mark the end of a backward pass that was a part of the optimizer's step."""
        mark = self._listener.mark()
        self._marks = mark, mark

    def optimizer_ends(self, optimizer: Any) -> None:
        """Mark the end of the update; of several optimizers the last counts."""
        if self._marks is not None:
            self._marks = self._marks[0], self._listener.mark()
            self._has_stepped = True

    # What the loop tells

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Give the batches of a loader without end, so that what comes after it is not reached."""
        if self._is_open:
            raise UserCodeError(
                f"{self._name} goes over autotune.steps within autotune.steps", "use it for the training loop alone"
            )
        self._is_open = True
        try:
            self.begin()
            while (yield from self._once(loader)):
                self.data_is_over()
        finally:
            self._is_open = False

    def _once(self, loader: Iterable[Any]) -> Generator[Any, None, bool]:
        """Give the batches of a loader once; whether there were any."""
        batches = iter(loader) if self._rehearsing is None else self._rehearsing.batches(loader)
        given = 0
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return given > 0
            given += 1
            self._on_batch(batch)
            self.micro_step_begins(time.perf_counter() - asked, batch_samples(batch))
            try:
                yield batch
            finally:
                self.micro_step_ends()

    @contextlib.contextmanager
    def micro_step(self) -> Iterator[None]:
        """Mark what is done within as a micro-step."""
        if self._is_open:
            raise UserCodeError(
                f"{self._name} uses autotune.step within autotune.steps or itself",
                "use one of them, once for each batch",
            )
        self._is_open = True
        try:
            self.begin()
            self.micro_step_begins(0.0, None)
            yield
            self.micro_step_ends()
        finally:
            self._is_open = False

    def begin(self) -> None:
        """Say that the first batch is about to be given, unless that was said."""
        if not self._has_begun:
            self._has_begun = True
            self._listener.begin()

    def micro_step_begins(self, wait_seconds: float, samples: int | None) -> None:
        """Say that a batch is there, after so long a wait, and how many samples it has."""
        if self._micro_steps == 0:
            self._listener.step_begins()
        else:
            self._wait_seconds += wait_seconds
        if samples is not None:
            self._is_short = self._is_short or samples < self._usual_samples
            self._usual_samples = max(self._usual_samples, samples)

    def micro_step_ends(self) -> None:
        """Say that what is done with a batch is done."""
        self._micro_steps += 1
        if self._backward_passes == 0:
            self._micro_steps_without_backward += 1
            if self._micro_steps_without_backward >= _MOST_WITHOUT_BACKWARD:
                raise UserCodeError(
                    f"{self._name} made no backward pass in {_MOST_WITHOUT_BACKWARD} batches",
                    "go over autotune.steps(loader) in the training loop alone",
                )
        self._backward_passes = 0
        if self._step_is_over():
            self._end_step()
        else:
            self._listener.micro_step_ends()

    def _step_is_over(self) -> bool:
        if self._marks is not None:
            return True
        # Of an optimizer that torch knows nothing of, or whose step the gradient scaler left out.
        waits = self._has_stepped and not self._may_skip
        return self._accumulation is not None and self._micro_steps >= self._accumulation and not waits

    def _end_step(self) -> None:
        is_early = self._accumulation is not None and self._micro_steps != self._accumulation
        was_skipped = self._marks is None and (self._has_stepped or self._may_skip)
        if is_early or was_skipped or self._is_short:
            self._drop(is_early=is_early)
            return
        self._whole_steps += 1
        self._dropped = self._early = 0
        mark = self._listener.mark() if self._marks is None else None
        marks, wait_seconds = self._marks or (mark, mark), self._wait_seconds
        self._reset()
        self._listener.step_ends(marks, wait_seconds)

    def _drop(self, *, is_early: bool) -> None:
        self._dropped += 1
        self._early += is_early
        micro_steps = self._micro_steps
        self._reset()
        self._listener.step_is_dropped()
        if self._early > _MOST_EARLY and self._whole_steps == 0:
            raise UserCodeError(
                f"{self._name} steps its optimizer after {micro_steps} batches, asked was {self._accumulation}",
                "have it accumulate as many batches as its gradient_accumulation_steps say",
            )
        if self._dropped > _MOST_DROPPED:
            raise UserCodeError(f"{self._name} made no whole step of its optimizer in {self._dropped} steps")

    def data_is_over(self) -> None:
        """Drop the step that the end of the data cut short; an early step just before it is no sign of anything."""
        self._early = 0
        if self._micro_steps:
            self._drop(is_early=False)

    def _reset(self) -> None:
        self._micro_steps, self._wait_seconds, self._is_short, self._marks = 0, 0.0, False, None


class MeasuredSteps(MeasureCallback, StepListener):
    """Measures the steps of a loop, as ``MeasureCallback`` does those of a ``Trainer``."""

    _wait_seconds = 0.0
    _saving_seconds = 0.0
    _control = SimpleNamespace()

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self._saving_seconds_each: list[float] = []

    def begin(self) -> None:
        """Start the clock of the first step."""
        self.on_train_begin(None, None, self._control)

    def restart_clock(self) -> None:
        """Start the clock of the first step anew: what came before it is no training."""
        self._start_clock()

    def step_begins(self) -> None:
        """Start a step: its first batch is there."""
        self.on_step_begin(None, None, self._control)

    def micro_step_ends(self) -> None:
        """End a micro-step that is not the last of its step."""
        self.on_substep_end(None, None, self._control)

    def step_ends(self, marks: tuple[Any, Any], wait_seconds: float) -> None:
        """Record the end of a step."""
        self._marks += marks
        self._wait_seconds = wait_seconds
        self._saving_seconds_each.append(self._saving_seconds)
        self._saving_seconds = 0.0
        self.on_step_end(None, None, self._control)

    def step_is_dropped(self) -> None:
        """Record nothing of a step that does not count."""
        self._saving_seconds = 0.0
        self.drop_step()

    def mark(self) -> Any:
        """Mark this point on the device's timeline."""
        return self._meter.mark()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Leave what is done within out of the step's time."""
        self._meter.synchronize()
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._saving_seconds += seconds
            self._previous_end += seconds
            self._begin += seconds
            if len(self._marks) == 1:
                self._marks = [self._meter.mark()]

    def measurement(self) -> Measurement:
        """Return the measurement so far, with the time that the code spends saving."""
        seconds = statistics.median_low(self._saving_seconds_each)
        return dataclasses.replace(super().measurement(), saving_seconds=seconds or None)

    @property
    def can_stop(self) -> bool:
        """Whether a step was measured, so that a loop that ends is none too soon."""
        return bool(self._measured)

    def _timed_step(self, end: float) -> _Step:
        """Count all waits of the step; those within it are a part of the time between the marks."""
        step = super()._timed_step(end)
        data_seconds = step.data_seconds + self._wait_seconds
        run = max(1, self.micro_steps_seen)
        # What a further micro-step takes is the time between two marks, which is the sum of both.
        # Its own wait may have been shorter than the mean of all.
        micro_seconds = max(0.0, step.micro_seconds - data_seconds / run)
        counted: _Step = dataclasses.replace(step, data_seconds=data_seconds, micro_seconds=micro_seconds)
        return counted


def batch_samples(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in a batch; ``None`` where it has none."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, list | tuple) else ()
    return next((found for value in values if (found := batch_samples(value)) is not None), None)
