"""Whether training goes as it should: the last loss is a number, and which updates fp16's scaler left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# torch.amp.GradScaler's default, which accelerate leaves as it is.
_FIRST_SCALE = 2.0**16


def on_each_micro_step(trainer: Any, take: Callable[[Any, Any], None]) -> None:
    """Have ``take`` called with the batch of every micro-step and its loss, a tensor that nobody has waited for.

    Works with any subclass of ``Trainer``, since it stands before the instance's own ``training_step``.
    """
    run_step = trainer.training_step

    def training_step(model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        loss = run_step(model, inputs, *arguments, **keywords)
        take(inputs, loss.detach())
        return loss

    trainer.training_step = training_step


class LossWatch:
    """Keeps the loss of a trainer's latest micro-step.

    A weight that became NaN makes every later loss NaN, so the last one tells of all. The ``Trainer`` itself
    leaves such losses out of what it logs (``logging_nan_inf_filter``).
    """

    def __init__(self, trainer: Any) -> None:
        self._latest: Any = None
        on_each_micro_step(trainer, self._keep)

    def _keep(self, _: Any, loss: Any) -> None:
        self._latest = loss

    def problem(self) -> str | None:
        """What is wrong with the last loss, in words; ``None`` where it is finite or no step was run."""
        value = 0.0 if self._latest is None else float(self._latest)
        return None if math.isfinite(value) else f"the loss of the last step is {value}"


class ScalerWatch:
    """Which updates a gradient scaler leaves out, step by step: its scale comes down with each of them.

    Reading the scale waits for the device. Without a scaler no update is left out.
    """

    def __init__(self, scaler: Any = None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scale = self._scaler.get_scale() if self._scaler is not None else 0.0
        self.skipped = 0
        """Updates that were left out so far."""

    def step_was_skipped(self) -> bool:
        """Whether the update of the step that just ended was left out; to be asked once a step."""
        if self._scaler is None:
            return False
        before, self._scale = self._scale, self._scaler.get_scale()
        is_skipped = bool(self._scale < before)
        self.skipped += is_skipped
        return is_skipped


def skipped_steps(scaler: Any, first_scale: float = _FIRST_SCALE) -> int:
    """How many updates a gradient scaler has left out so far, from how far its scale has come down; 0 without one.

    True while the scale has not grown yet: it does so after ``growth_interval`` (2,000) good steps in a row.
    The fused optimizers leave an update out on the device, where accelerate's own count does not see it.
    Waits for the device.
    """
    if scaler is None or not scaler.is_enabled():
        return 0
    return round(math.log(first_scale / scaler.get_scale()) / -math.log(scaler.get_backoff_factor()))
