"""Train with a stock ``Trainer`` and exported arguments in a fresh process, as a user will.

Started as ``python -m autotune.worker.verify.stock RESULT_FD``. It reads its work, a line of JSON, from standard
input, and writes its result to the file descriptor. Unlike a trial it is not forked, has no measuring callback, and no
memory cap unless the work sets one.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import PartialState
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from autotune.core.real_training import PeakBytes, StockResult, StockWork, Stretch
from autotune.core.units import GIB
from autotune.training import apply
from autotune.worker import process
from autotune.worker.dataset.prepared import PreparedDataset
from autotune.worker.facts import package_versions
from autotune.worker.rendezvous import prepare_deepspeed
from autotune.worker.trial.build import check_devices, model_for, shard_from_meta
from autotune.worker.trial.cores import pin_to_one_core
from autotune.worker.trial.meter import Meter, failure_of, open_meter
from autotune.worker.trial.step_checks import LossWatch, on_each_micro_step, skipped_steps
from autotune.worker.trial.synthetic import synthetic_dataset, synthetic_ingredients

# Number of batches in the one evaluation, at the Trainer's default batch size. Its peak memory is that of one batch.
_EVALUATION_BATCHES = 4
# The run is timed in about this many stretches, whose speeds give the spread. Marks on the device's timeline are their
# ends, since a training whose host goes on while the GPU computes would start each stretch with an idle GPU.
_STRETCHES = 10
# A larger checkpoint is not written: one of Llama-3.1-8B, 96 GB, takes longer than the steps (four H100). A choice.
_MOST_SAVED_BYTES = 20 * GIB
# Most warm-up steps, which are not timed: kernels are loaded in them, and the allocator reserves its segments.
_MOST_WARMUP_STEPS = 5


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Times stretches of steps, and reads peak memory around one evaluation and one checkpoint in the middle."""

    def __init__(
        self,
        meter: Meter,
        steps: int,
        evaluates: bool,
        wait_for_ranks: Callable[[], None],
        row_counts: Iterator[int] | None = None,
    ) -> None:
        self._meter = meter
        self._row_counts = row_counts
        """Samples of each packed batch, which itself does not show them; ``None`` without packing."""
        self._wait_for_ranks = wait_for_ranks
        self._steps = steps
        self._warmup = min(_MOST_WARMUP_STEPS, steps // 4)
        self._pause_after = (self._warmup + steps) // 2 if evaluates else None
        self._stretch_steps = max(1, (steps - self._warmup) // _STRETCHES)
        self._began_at = 0.0
        self._first_step = 0
        self._joules_before: float | None = None
        self._began_idle = False
        """Whether the device was idle when the stretch began."""
        self._start_mark: Any = None
        self._ended: list[tuple[int, int, int, Any, Any]] = []
        """Steps, samples, new shapes, begin and end of each stretch since the device was last waited for."""
        self._seen_shapes: set[Any] = set()
        self._samples = 0
        self._new_shapes = 0
        self.during = "train"
        self.unsaved_bytes: int | None = None
        """Size of a checkpoint that is too large to be written; ``None`` where it is written."""
        self.stretches: list[Stretch] = []
        self.untimed_samples = 0
        """Samples of the steps that began with an idle device. The energy is theirs, too."""
        self.joules: float | None = 0.0
        self.peaks: dict[str, PeakBytes] = {}
        self.pause_seconds: dict[str, float] = {}

    def count(self, inputs: Any, _: Any) -> None:
        """Count the samples of a batch, and whether its shapes are new.

        Shapes are compared without the first dimension: a smaller last batch of an epoch is not new.
        """
        shapes = tuple(value.shape for value in inputs.values() if hasattr(value, "shape"))
        lengths = tuple(shape[1:] for shape in shapes)
        # Where samples are joined to one row, the cumulative lengths are one more than the samples.
        joined = inputs.get("cu_seq_lens_q")
        if joined is None:
            self._samples += shapes[0][0]
        else:
            self._samples += len(joined) - 1 if self._row_counts is None else next(self._row_counts)
        self._new_shapes += lengths not in self._seen_shapes
        self._seen_shapes.add(lengths)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End and begin stretches. The Trainer evaluates and saves after this call, if requested here."""
        step = state.global_step
        if step < self._warmup:
            return
        is_pause = step == self._pause_after
        is_end = is_pause or step == self._steps or step - self._first_step == self._stretch_steps
        if step == self._warmup:
            self._begin_idle(step)
        elif is_end:
            self._end_stretch(step)
        elif self._began_idle:
            # Begin anew after the first step: only now is the host ahead of the device, as in a usual step.
            self.untimed_samples += self._samples
            self._begin_stretch(step)
        if is_pause or step == self._steps:
            self._read_stretches()
            self._begin_idle(step)
        if is_pause:
            self.peaks["before"] = self._meter.peaks()
            control.should_evaluate, control.should_save = True, self.unsaved_bytes is None
            self.during = "evaluate"
        elif step == self._steps:
            self.peaks["end"] = self._meter.peaks()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of the evaluation, after which the Trainer saves a checkpoint, or else training goes on."""
        self._pause_ends("evaluate")
        self.during = "save"
        if self.unsaved_bytes is not None:
            self._resume(state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of the checkpoint, and continue training."""
        self._pause_ends("save")
        self._resume(state)

    def _resume(self, state: Any) -> None:
        """Wait for all ranks and begin a new stretch."""
        # The first rank alone writes the model. The other ranks would wait for it in their next step, which is timed.
        self.during = "train"
        self._wait_for_ranks()
        self._begin_idle(state.global_step)

    def _pause_ends(self, what: str) -> None:
        """Record peak memory and duration of the evaluation or the checkpoint that ends, under the name ``what``."""
        self._meter.synchronize()
        self.peaks[what] = self._meter.peaks()
        # The first pause began when the device was last idle; the checkpoint comes after the evaluation.
        self.pause_seconds[what] = time.perf_counter() - self._began_at - sum(self.pause_seconds.values())

    def _begin_idle(self, step: int) -> None:
        """Wait for the device, and begin a stretch. It begins anew after its first step, unless that is its last."""
        self._meter.synchronize()
        self._began_at, self._joules_before = time.perf_counter(), self._meter.energy_joules()
        self._begin_stretch(step)
        self._began_idle = True

    def _begin_stretch(self, step: int) -> None:
        """Begin a stretch after step ``step``."""
        self._samples = self._new_shapes = 0
        self._first_step, self._start_mark, self._began_idle = step, self._meter.mark(), False

    def _end_stretch(self, step: int) -> None:
        """End the stretch after step ``step``, at the mark with which the next stretch begins."""
        steps, samples, new_shapes, begin = step - self._first_step, self._samples, self._new_shapes, self._start_mark
        self._begin_stretch(step)
        self._ended.append((steps, samples, new_shapes, begin, self._start_mark))

    def _read_stretches(self) -> None:
        """Wait for the device, and add the stretches and the energy since ``_begin_idle`` to the results."""
        self._meter.synchronize()
        for steps, samples, new_shapes, begin, end in self._ended:
            self.stretches.append(Stretch(steps, samples, self._meter.seconds_between(begin, end), new_shapes))
        self._ended = []
        before, after, total = self._joules_before, self._meter.energy_joules(), self.joules
        self.joules = None if before is None or after is None or total is None else total + after - before


def run_stock(work: StockWork, output_dir: str, rank: int = 0) -> StockResult:
    """Train on this rank with a stock ``Trainer``; return the measurements or the failure."""
    uuid = work.devices.uuids[rank]
    core = pin_to_one_core(uuid, work.cpu_core) if work.pinned else None
    meter = open_meter(work.devices.kind, uuid, rank, work.devices.ranks)
    if work.cap_bytes is not None:
        meter.limit(work.cap_bytes)
    data = work.workload.data
    row_counts = None
    if data is not None and data.packing and data.facts is not None:
        row_counts = _row_counts(data.facts.samples, work)
    watch = _Watch(meter, work.steps, work.evaluates, lambda: PartialState().wait_for_everyone(), row_counts)
    try:
        return _train(work, output_dir, meter, watch, core)
    except Exception as error:
        outcome = failure_of(error, meter, watch.during, work.cap_bytes, on_cpu=work.devices.kind == "cpu")
        return StockResult(outcome.state, outcome.message, outcome.during)


def _row_counts(dataset_rows: int, work: StockWork) -> Iterator[int]:
    """Yield the number of rows of the packed dataset in each batch, epoch after epoch without end."""
    batch = int(work.arguments["per_device_train_batch_size"])
    # accelerate fills the last batch of an epoch where several ranks share the dataset.
    last = dataset_rows % batch if work.devices.ranks == 1 else 0
    return itertools.cycle([batch] * (dataset_rows // batch) + [last] * bool(last))


def checkpoint_bytes(model: Any, *, only_trained: bool) -> int:
    """Return the bytes of a checkpoint: weights (or only trained ones), and two float32 moments of trained weights."""
    # A rank of ZeRO-3 has parts of the tensors.
    sized = [(p, getattr(p, "ds_numel", p.numel())) for p in model.parameters()]
    weights: int = sum(count * p.element_size() for p, count in sized if p.requires_grad or not only_trained)
    moments: int = sum(8 * count for p, count in sized if p.requires_grad)
    return weights + moments


def _train(work: StockWork, output_dir: str, meter: Meter, watch: _Watch, core: int | None) -> StockResult:
    """Build model, data and ``Trainer``, train, and return the measurements."""
    set_seed(work.seed)
    workload = work.workload
    # These replace what the user has exported.
    fixed = {"max_steps": work.steps, "report_to": "none", "disable_tqdm": True, "seed": work.seed}
    fixed |= {"output_dir": output_dir, "save_strategy": "no"}
    dataset = None
    if workload.data is not None:
        assert work.data_folder is not None
        dataset = PreparedDataset(workload, work.data_folder)
        fixed |= dataset.arguments
    if "deepspeed" in work.arguments:
        offloads = "offload_optimizer" in work.arguments["deepspeed"]["zero_optimization"]
        prepare_deepspeed(work.devices.kind, work.devices.ranks, offloads=offloads)
    arguments = TrainingArguments(**{**work.arguments, **fixed})
    check_devices(arguments, work.devices.ranks)
    # The model is built after the arguments, as in scripts: ZeRO-3 then shards it while it is built.
    model, is_on_meta = model_for(work.arguments, workload, work.attn_implementation, meter.device)
    saved_bytes = checkpoint_bytes(model, only_trained=bool(workload.peft))
    if saved_bytes > min(_MOST_SAVED_BYTES, shutil.disk_usage(output_dir).free // 2):
        watch.unsaved_bytes = saved_bytes
    eval_samples = _EVALUATION_BATCHES * arguments.per_device_eval_batch_size
    if dataset is not None:
        ingredients = dataset.ingredients(model, eval_samples)
    else:
        per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        ingredients = synthetic_ingredients(workload, model, per_step * work.steps, work.seed)
        ingredients["eval_dataset"] = synthetic_dataset(workload, model, eval_samples, work.seed)
    trainer = Trainer(model=model, args=arguments, callbacks=[watch], **ingredients)
    if is_on_meta:
        shard_from_meta(trainer, workload)
    trainer = apply(trainer, **work.applied)
    on_each_micro_step(trainer, watch.count)
    losses = LossWatch(trainer)
    trainer.train()
    samples_of_energy = sum(stretch.samples for stretch in watch.stretches) + watch.untimed_samples
    return StockResult(
        "completed",
        packages=package_versions(),
        cpu_core=core,
        stretches=tuple(watch.stretches),
        peak_bytes=watch.peaks,
        unsaved_bytes=watch.unsaved_bytes,
        pause_seconds=watch.pause_seconds,
        joules_per_sample=watch.joules / samples_of_energy if watch.joules else None,
        skipped_steps=skipped_steps(trainer.accelerator.scaler, trainer.state.global_step),
        loss_problem=losses.problem(),
        evaluation_batch_size=trainer.args.per_device_eval_batch_size,
    )


if __name__ == "__main__":
    process.serve_one_job(StockWork, run_stock)
