"""Check that the training loss stays finite, and count the updates that fp16's gradient scaler skips."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# Default of torch.amp.GradScaler, which accelerate does not change.
_FIRST_SCALE = 2.0**16


def on_each_micro_step(trainer: Any, take: Callable[[Any, Any], None]) -> None:
    """Call ``take`` with batch and loss of every micro-step; the loss is a device tensor, without waiting.

    Works with any subclass of ``Trainer``, since it wraps the instance's own ``training_step``.
    """
    run_step = trainer.training_step

    def training_step(model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        loss = run_step(model, inputs, *arguments, **keywords)
        take(inputs, loss.detach())
        return loss

    trainer.training_step = training_step


class LossWatch:
    """Keeps the loss of a trainer's latest micro-step.

    A weight that became NaN makes every later loss NaN, so checking the last one is enough. The ``Trainer`` itself
    leaves such losses out of its log (``logging_nan_inf_filter``).
    """

    def __init__(self, trainer: Any) -> None:
        self._latest: Any = None
        on_each_micro_step(trainer, lambda _, loss: setattr(self, "_latest", loss))

    def problem(self) -> str | None:
        """Return the problem of the last loss in words; ``None`` where it is finite or there is none."""
        return problem_of_loss(None if self._latest is None else float(self._latest))


def problem_of_loss(last: float | None) -> str | None:
    """Return the problem of a training's last loss in words; ``None`` where it is finite or there is none."""
    return None if last is None or math.isfinite(last) else f"the loss of the last step is {last}"


class ScalerWatch:
    """Counts the updates that a gradient scaler skips, step by step: each of them lowers its scale.

    Reading the scale waits for the device. Without a scaler no update is skipped.
    """

    def __init__(self, optimizer: Any = None) -> None:
        """Take the optimizer that accelerate wrapped. DeepSpeed's optimizer scales the loss without a scaler."""
        self._deepspeeds = optimizer if type(optimizer).__name__ == "DeepSpeedOptimizerWrapper" else None
        scaler = getattr(optimizer, "scaler", None)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scale = self._scaler.get_scale() if self._scaler is not None else 0.0
        self.skipped = 0
        """Updates skipped so far."""

    def step_was_skipped(self) -> bool:
        """Return whether the step that just ended skipped its update. Call this once a step."""
        is_skipped = self._deepspeeds is not None and bool(self._deepspeeds.step_was_skipped)
        if self._scaler is not None:
            before, self._scale = self._scale, self._scaler.get_scale()
            is_skipped = bool(self._scale < before)
        self.skipped += is_skipped
        return is_skipped


def skipped_steps(scaler: Any, steps: int) -> int | None:
    """Return how many steps a gradient scaler has skipped, from its scale; 0 without a scaler.

    ``None`` where the scale may have grown, as it does after ``growth_interval`` (2,000) good steps in a row. The fused
    optimizers skip updates on the device, where accelerate does not count them. Waits for the device.
    """
    if scaler is None or not scaler.is_enabled():
        return 0
    if steps >= scaler.get_growth_interval():
        return None
    return round(math.log(_FIRST_SCALE / scaler.get_scale()) / -math.log(scaler.get_backoff_factor()))
