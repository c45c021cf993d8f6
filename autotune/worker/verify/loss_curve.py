"""Train a few steps without dropout in a fresh process, and report the loss and gradient norm of each.

Started as ``python -m autotune.worker.verify.loss_curve RESULT_FD``, with work as ``stock`` reads it. With one seed,
two candidates with the same samples a step start from the same weights, and see the same samples in the same order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainerCallback

from autotune.core.verification import LossCurve, StockWork
from autotune.core.workload import Workload
from autotune.worker.process import serve_one_job
from autotune.worker.trial.build import build_config
from autotune.worker.trial.losses import ScalerWatch, on_each_micro_step
from autotune.worker.trial.meter import open_meter
from autotune.worker.verify.stock import build_trainer, classify_failure

# fp16's scaler starts at 65,536 and skips updates until gradients no longer overflow. From this scale none is skipped.
_MODEST_SCALE = 2.0**7


def without_dropout(workload: Workload) -> Workload:
    """Return the workload with every dropout probability set to 0, including the config's defaults."""
    config = build_config(workload).to_dict()
    calm = {key: 0.0 if "drop" in key and isinstance(value, float) else value for key, value in config.items()}
    return dataclasses.replace(workload, config={**calm, "model_type": workload.model_type})


class _Curve(TrainerCallback):  # type: ignore[misc]
    """Records the loss of each step, summed over micro-steps, and the gradient norm that the Trainer logs."""

    def __init__(self, micro_steps: int) -> None:
        self._micro_steps = micro_steps
        self._losses: list[Any] = []
        self.updates = ScalerWatch()
        self.gradient_norms: list[float] = []
        self.skipped: list[int] = []
        """Number of updates skipped so far, after each step."""

    def take(self, _: Any, loss: Any) -> None:
        """Record one micro-step's share of the loss of its step."""
        self._losses.append(loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record how many updates were skipped so far."""
        self.updates.step_was_skipped()
        self.skipped.append(self.updates.skipped)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the gradient norm before clipping."""
        if logs and "grad_norm" in logs:
            self.gradient_norms.append(float(logs["grad_norm"]))

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        values = [float(loss) for loss in self._losses]
        return [sum(values[at : at + self._micro_steps]) for at in range(0, len(values), self._micro_steps)]


def run_curve(work: StockWork, output_dir: str) -> LossCurve:
    """Train the steps; return the loss and gradient norm of each, or how it failed."""
    meter = open_meter(work.devices.kind, work.devices.uuids[0])
    if work.cap_bytes is not None:
        meter.limit(work.cap_bytes)
    try:
        curve = _Curve(int(work.arguments["gradient_accumulation_steps"]))
        calm = dataclasses.replace(work, workload=without_dropout(work.workload))
        trainer = build_trainer(calm, output_dir, meter, [curve], {"logging_strategy": "steps", "logging_steps": 1})
        scaler = trainer.accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "scale": _MODEST_SCALE})
        curve.updates = ScalerWatch(scaler)
        on_each_micro_step(trainer, curve.take)
        trainer.train()
        return LossCurve("completed", tuple(curve.losses), tuple(curve.gradient_norms), tuple(curve.skipped))
    except Exception as error:
        outcome = classify_failure(error, "train", meter, work)
        return LossCurve(outcome.state, message=outcome.message, during=outcome.during)


if __name__ == "__main__":
    serve_one_job(StockWork, run_curve)
