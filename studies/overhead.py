"""What autotune's instruments cost: the same steps with and without them, in alternation, in one process.

    python studies/overhead.py --model bert-large-uncased --batch 32 --accumulation 2 --precision bf16 > FILE.json
    python studies/overhead.py --model bert-tiny --seq-len 64 --device cpu

Each round trains twice with a stock ``Trainer`` that only looks at the clock before the first and after the last
of the compared steps: once with the callback of a trial beside it, once without, in changing order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Effort, Measurement
from autotune.core.workload import Workload
from autotune.devices import find_device
from autotune.models.resolve import resolve_model
from autotune.models.tasks import choose_seq_len, infer_task
from autotune.space.training_arguments import training_arguments
from autotune.worker.facts import package_versions
from autotune.worker.trial.build import build_model
from autotune.worker.trial.losses import LossWatch
from autotune.worker.trial.measure import MeasureCallback
from autotune.worker.trial.meter import Meter, open_meter
from autotune.worker.trial.synthetic import synthetic_dataset

_WARMUP_STEPS = 3


class _Clock(TrainerCallback):  # type: ignore[misc]
    """The time of the compared steps, synchronised at both ends and nowhere between."""

    def __init__(self, meter: Meter, steps: int) -> None:
        self._meter, self._last = meter, _WARMUP_STEPS + steps
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (_WARMUP_STEPS, self._last):
            self._meter.synchronize()
            self.seconds = time.perf_counter() - self.seconds


def _train(meter: Meter, workload: Workload, candidate: Candidate, steps: int, *, instruments: bool) -> float:
    """Seconds of ``steps`` optimizer steps."""
    set_seed(0)
    model = build_model(workload, candidate.arm.attn_implementation, meter.device)
    fields = TrainingArguments.__dataclass_fields__
    most = _WARMUP_STEPS + steps
    clock = _Clock(meter, steps)
    callbacks: list[Any] = [clock]
    if instruments:
        effort = Effort(_WARMUP_STEPS, steps, steps, 0.0, 1e9, None, candidate.gradient_accumulation_steps)
        found: list[Measurement] = []
        callbacks.append(MeasureCallback(meter, candidate, effort, found.append, lambda step: None))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            **training_arguments(candidate, fields, meter.device.type),
            output_dir=folder, max_steps=most, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        data = synthetic_dataset(workload, model, candidate.samples_per_step * most, 0)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        if instruments:
            LossWatch(trainer)
        trainer.train()
    return clock.seconds


def main() -> None:
    """Print every pair of times and what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device")
    options = parser.parse_args()
    source, device = resolve_model(options.model), find_device(options.device)
    task = options.task or infer_task(source.config)
    workload = Workload(source.name, source.config, task, choose_seq_len(source.config, task, options.seq_len))
    candidate = Candidate(Arm(options.precision), options.batch, options.accumulation)
    meter = open_meter(device.kind, device.uuid)
    stdout, sys.stdout = sys.stdout, sys.stderr  # the Trainer prints
    _train(meter, workload, candidate, options.steps, instruments=True)
    pairs: list[tuple[float, float]] = []
    for index in range(options.rounds):
        order = (False, True) if index % 2 else (True, False)
        seconds = {which: _train(meter, workload, candidate, options.steps, instruments=which) for which in order}
        pairs.append((seconds[False], seconds[True]))
    ratios = [ours / stock for stock, ours in pairs]
    document = {
        "command": ["python", "studies/overhead.py", *sys.argv[1:]],
        "device": device.name,
        "packages": package_versions(),
        "candidate": candidate.parameters(),
        "steps": options.steps,
        "stock_seconds": [round(stock, 5) for stock, _ in pairs],
        "instrumented_seconds": [round(ours, 5) for _, ours in pairs],
        "overhead": statistics.median(ratios) - 1,
        "overhead_of_the_fastest": min(ours for _, ours in pairs) / min(stock for stock, _ in pairs) - 1,
        "overhead_half_interval": 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None,
        "step_seconds": min(stock for stock, _ in pairs) / options.steps,
    }
    print(json.dumps(document, indent=2), file=stdout)


if __name__ == "__main__":
    main()
