"""Train with a stock ``Trainer`` and exported arguments in a fresh process, as a user will.

Started as ``python -m autotune.worker.verify.stock RESULT_FD``. It reads one job, a line of JSON, from standard input,
and writes one line of JSON to the file descriptor. Unlike a trial it is not forked, has no measuring callback, and no
memory cap unless the job sets one.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from autotune.core.candidate import Document
from autotune.core.workload import Workload
from autotune.worker import process
from autotune.worker.dataset.prepared import PreparedDataset
from autotune.worker.facts import package_versions
from autotune.worker.failures import classify
from autotune.worker.trial.affinity import pin_to_one_core
from autotune.worker.trial.build import build_model
from autotune.worker.trial.losses import LossWatch, on_each_micro_step, skipped_steps
from autotune.worker.trial.meter import Meter, open_meter
from autotune.worker.trial.synthetic import synthetic_dataset

# Number of batches in the one evaluation, at the Trainer's default batch size. Its peak memory is that of one batch.
_EVALUATION_BATCHES = 4
# The run is timed in this many stretches, whose speeds give the spread. Only their ends synchronize with the device.
_STRETCHES = 10
# Most warm-up steps at the beginning, in which kernels are loaded and the allocator reserves its segments.
_MOST_WARMUP_STEPS = 5


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Times a few stretches of steps, triggers one evaluation and one checkpoint, and reads the peaks around them."""

    def __init__(self, meter: Meter, steps: int, evaluates: bool) -> None:
        self._meter = meter
        self._steps = steps
        self._warmup = min(_MOST_WARMUP_STEPS, steps // 4)
        self._pause_after = (self._warmup + steps) // 2 if evaluates else None
        self._stretch = max(1, (steps - self._warmup) // _STRETCHES)
        self._began = 0.0
        self._first_step = 0
        self._joules = 0.0
        self._shapes: set[Any] = set()
        self._samples = 0
        self._new_shapes = 0
        self.during = "train"
        self.stretches: list[Document] = []
        """Each with ``steps``, ``samples``, ``seconds``, and ``new_shapes``: batches with shapes that none before
        had."""
        self.joules: float | None = 0.0
        self.peaks: dict[str, dict[str, int]] = {}
        self.pause_seconds: dict[str, float] = {}

    def count(self, inputs: Any, _: Any) -> None:
        """Count a batch.

        The smaller last batch of an epoch has a new shape but no new length, so lengths are compared.
        """
        shapes = tuple(value.shape for value in inputs.values() if hasattr(value, "shape"))
        lengths = tuple(shape[1:] for shape in shapes)
        self._samples += shapes[0][0]
        self._new_shapes += lengths not in self._shapes
        self._shapes.add(lengths)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End and begin stretches. The Trainer evaluates and saves after this call, where it is told to."""
        step = state.global_step
        if step < self._warmup:
            return
        is_pause = step == self._pause_after
        is_end = is_pause or step == self._steps or step - self._first_step == self._stretch
        if step == self._warmup:
            self._begin(step)
        elif is_end:
            self._end(step)
            self._begin(step)
        if is_pause:
            self.peaks["before"] = self._meter.peaks()._asdict()
            control.should_evaluate = control.should_save = True
            self.during = "evaluate"
        elif step == self._steps:
            self.peaks["end"] = self._meter.peaks()._asdict()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of the evaluation, which the checkpoint follows."""
        self._after("evaluate")
        self.during = "save"

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of the checkpoint, and go on with training."""
        self._after("save")
        self.during = "train"
        self._begin(state.global_step)

    def _after(self, what: str) -> None:
        self._meter.synchronize()
        self.peaks[what] = self._meter.peaks()._asdict()
        self.pause_seconds[what] = time.perf_counter() - self._began - sum(self.pause_seconds.values())

    def _begin(self, step: int) -> None:
        self._meter.synchronize()
        self._samples = self._new_shapes = 0
        self._first_step, self._began = step, time.perf_counter()
        self._joules = self._meter.energy_joules() or 0.0

    def _end(self, step: int) -> None:
        self._meter.synchronize()
        seconds = time.perf_counter() - self._began
        counted = {"steps": step - self._first_step, "samples": self._samples, "new_shapes": self._new_shapes}
        self.stretches.append({"seconds": seconds, **counted})
        joules = self._meter.energy_joules()
        self.joules = None if joules is None or self.joules is None else self.joules + joules - self._joules


def run_stock(job: Document) -> Document:
    """Train ``job["steps"]`` optimizer steps; return the measurements or how it failed, as JSON-ready data."""
    core = pin_to_one_core(job["device_uuid"], job.get("cpu_core")) if job.get("cpu_affinity") else None
    rank = job.get("rank", 0)
    meter = open_meter(job["device_kind"], job["device_uuids"][rank] if rank else job["device_uuid"], rank)
    if job["cap_bytes"] is not None:
        meter.limit(job["cap_bytes"])
    watch = _Watch(meter, job["steps"], job["evaluates"])
    try:
        return {"state": "completed", "packages": package_versions(), "cpu_core": core, **_train(job, meter, watch)}
    except Exception as error:
        allocated, reserved = meter.peaks()
        memory = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "cap_bytes": job["cap_bytes"]}
        outcome = classify(error, during=watch.during, on_cpu=job["device_kind"] == "cpu", memory=memory)
        print(getattr(outcome, "traceback", outcome.message), file=sys.stderr)
        return {"state": outcome.state, "message": outcome.message, "during": outcome.during, **memory}


def build_trainer(job: Document, meter: Meter, arguments: Document, callbacks: list[Any]) -> Any:
    """Build a ``Trainer`` of the job's workload with the exported arguments unchanged, and ``arguments`` added."""
    set_seed(job["seed"])
    workload = Workload.from_document(job["workload"])
    model = build_model(workload, job["attn_implementation"], meter.device)
    fixed = {"max_steps": job["steps"], "report_to": "none", "disable_tqdm": True, "seed": job["seed"]}
    fixed |= {"output_dir": job["output_dir"], "save_strategy": "no"}
    dataset = PreparedDataset(workload, job["data_folder"]) if workload.data is not None else None
    made = TrainingArguments(**{**job["arguments"], **fixed, **arguments, **(dataset.arguments if dataset else {})})
    if made.n_gpu > 1:
        raise RuntimeError(f"{made.n_gpu} GPUs are visible; exactly one was expected")
    if made.world_size != job.get("ranks", 1):
        raise RuntimeError(f"the Trainer sees {made.world_size} ranks; {job.get('ranks', 1)} were expected")
    evaluated = _EVALUATION_BATCHES * made.per_device_eval_batch_size
    if dataset is not None:
        return Trainer(model=model, args=made, callbacks=callbacks, **dataset.ingredients(model, evaluated))
    per_step = made.per_device_train_batch_size * made.gradient_accumulation_steps * made.world_size
    return Trainer(
        model=model,
        args=made,
        train_dataset=synthetic_dataset(workload, model, per_step * job["steps"], job["seed"]),
        eval_dataset=synthetic_dataset(workload, model, evaluated, job["seed"]),
        callbacks=callbacks,
    )


def _train(job: Document, meter: Meter, watch: _Watch) -> Document:
    trainer = build_trainer(job, meter, {}, [watch])
    on_each_micro_step(trainer, watch.count)
    losses = LossWatch(trainer)
    trainer.train()
    samples = sum(stretch["samples"] for stretch in watch.stretches)
    return {
        "stretches": watch.stretches,
        "peak_bytes": watch.peaks,
        "pause_seconds": watch.pause_seconds,
        "joules_per_sample": watch.joules / samples if watch.joules else None,
        "skipped_steps": skipped_steps(trainer.accelerator.scaler),
        "loss_problem": losses.problem(),
        "evaluation_batch_size": trainer.args.per_device_eval_batch_size,
    }


if __name__ == "__main__":
    process.serve_one_job(run_stock)
