"""Tell a step timer of the steps of a ``Trainer``, and keep the inputs of left-out micro-steps on the device.

The Trainer moves the inputs of all micro-steps to the device before the first one runs. A trial that runs only a few of
the micro-steps would otherwise show too small a peak, and complete where the training runs out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from autotune.worker.arrays import arrays_in
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
        """Report that all batches of a step have arrived."""
        self._marks = []
        self.timer.step_begins()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the end of a micro-step that is not the last."""
        self.timer.micro_step_ends()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record a mark at the end of the backward pass, with gradient clipping, and at the end of the update."""
        self._marks.append(self.timer.mark())

    on_optimizer_step = on_pre_optimizer_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the end of a step, and stop the training when enough is measured."""
        self.timer.step_ends((self._marks[0], self._marks[-1]))
        control.should_training_stop |= self.timer.is_finished

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the end of the data."""
        self.timer.end()


# c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: the size of every request is rounded up to a multiple of it.
_BLOCK_BYTES = 512
# The inputs of one step are freed only after those of the next are there, so two steps show the peak.
_EXCHANGES = 2


class LeftOutInputs:
    """Copies of a micro-step's inputs, one for each micro-step that the trial leaves out."""

    def __init__(self, trainer: Any, left_out: int, on_batch: Callable[[Any], None] = lambda _: None) -> None:
        """Copy the inputs at the start of each of the trainer's steps. ``on_batch`` is called with every batch."""
        self.micro_batch_bytes: int | None = None
        """Bytes that the inputs of the largest micro-step so far take on the device; ``None`` before the first step."""
        self._left_out = left_out
        self._held: list[list[torch.Tensor]] = []
        self._exchanges = 0
        self._device_type = trainer.args.device.type
        self._on_batch = on_batch
        self._fetch = trainer.get_batch_samples
        trainer.get_batch_samples = self._get_batch_samples

    def _get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of a step, and copy the inputs."""
        fetched = self._fetch(*args, **kwargs)
        if isinstance(fetched, tuple) and fetched and isinstance(fetched[0], list):
            self._hold(fetched[0])
            for inputs in fetched[0]:
                self._on_batch(inputs)
        return fetched

    def _hold(self, micro_batches: list[Any]) -> None:
        """Copy the largest of these inputs if they are larger than the current copies; in the first steps always.

        Later steps are timed. The copies stay, so that nothing is allocated in timed steps.
        """
        largest = max(
            (list(self._device_tensors(inputs)) for inputs in micro_batches), key=_rounded_bytes, default=None
        )
        if largest is None:
            return
        size_bytes = _rounded_bytes(largest)
        is_larger = self.micro_batch_bytes is None or size_bytes > self.micro_batch_bytes
        if not is_larger and self._exchanges >= _EXCHANGES:
            return
        self._exchanges += 1
        if is_larger:
            self.micro_batch_bytes = size_bytes
        if is_larger or size_bytes == self.micro_batch_bytes:
            self._held = [[tensor.clone() for tensor in largest] for _ in range(self._left_out)]

    def _device_tensors(self, inputs: Any) -> Iterator[torch.Tensor]:
        tensors = (array for array in arrays_in(inputs) if isinstance(array, torch.Tensor))
        return (tensor for tensor in tensors if tensor.device.type == self._device_type)


def _rounded_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES for tensor in tensors)
