"""Train a few steps without dropout in a fresh process, and report the loss and gradient norm of each.

Started as ``python -m autotune.worker.verify.loss_curve RESULT_FD``, with a job as ``stock`` reads it. With one seed,
two candidates with the same samples a step start from the same weights, and see the same samples in the same order.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback

from autotune.core.candidate import Document
from autotune.core.workload import Workload
from autotune.worker.failures import classify
from autotune.worker.process import serve_one_job
from autotune.worker.trial.build import build_config
from autotune.worker.trial.losses import on_each_micro_step, skipped_steps
from autotune.worker.trial.meter import open_meter
from autotune.worker.verify.stock import build_trainer

# fp16's scaler starts at 65,536 and skips updates until gradients no longer overflow. From this scale none is skipped.
_MODEST_SCALE = 2.0**7


def without_dropout(workload: Workload) -> Document:
    """Return the workload's document with every dropout probability set to 0, including the config's defaults."""
    config = build_config(workload).to_dict()
    calm = {key: 0.0 if "drop" in key and isinstance(value, float) else value for key, value in config.items()}
    return {**workload.document(), "config": {**calm, "model_type": workload.model_type}}


class _Curve(TrainerCallback):  # type: ignore[misc]
    """Records the loss of each step, summed over micro-steps, and the gradient norm that the Trainer logs."""

    def __init__(self, micro_steps: int) -> None:
        self._micro_steps = micro_steps
        self._losses: list[Any] = []
        self.scaler: Any = None
        self.gradient_norms: list[float] = []
        self.skipped: list[int] = []
        """Number of updates skipped so far, after each step."""

    def take(self, _: Any, loss: Any) -> None:
        """Record one micro-step's share of the loss of its step."""
        self._losses.append(loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record how many updates were skipped so far."""
        self.skipped.append(skipped_steps(self.scaler, _MODEST_SCALE))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the gradient norm before clipping."""
        if logs and "grad_norm" in logs:
            self.gradient_norms.append(float(logs["grad_norm"]))

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        values = [float(loss) for loss in self._losses]
        return [sum(values[at : at + self._micro_steps]) for at in range(0, len(values), self._micro_steps)]


def run_curve(job: Document) -> Document:
    """Train ``job["steps"]`` steps; return ``losses`` and ``gradient_norms`` of each, or how it failed."""
    meter = open_meter(job["device_kind"], job["device_uuid"])
    if job["cap_bytes"] is not None:
        meter.limit(job["cap_bytes"])
    try:
        calm = {**job, "workload": without_dropout(Workload.from_document(job["workload"]))}
        curve = _Curve(int(job["arguments"]["gradient_accumulation_steps"]))
        arguments = {"logging_strategy": "steps", "logging_steps": 1}
        trainer = build_trainer(calm, meter, arguments, [curve])
        curve.scaler = scaler = trainer.accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "scale": _MODEST_SCALE})
        on_each_micro_step(trainer, curve.take)
        trainer.train()
        return {
            "state": "completed",
            "losses": curve.losses,
            "gradient_norms": curve.gradient_norms,
            "skipped": curve.skipped,
        }
    except Exception as error:
        allocated, reserved = meter.peaks()
        memory = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "cap_bytes": job["cap_bytes"]}
        outcome = classify(error, during="train", on_cpu=job["device_kind"] == "cpu", memory=memory)
        print(getattr(outcome, "traceback", outcome.message), file=sys.stderr)
        return {"state": outcome.state, "message": outcome.message, "during": outcome.during}


if __name__ == "__main__":
    serve_one_job(run_curve)
