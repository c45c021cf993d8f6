"""Run one trial: train a candidate with a real ``Trainer``, and return a measurement, out of memory or a failure.

The Trainer moves the inputs of all micro-steps to the device before the first one runs. A trial that runs only a few of
the micro-steps would otherwise show too small a peak, and complete where the training runs out of memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from autotune.core.candidate import Candidate
from autotune.core.messages import Progress, TrialWork
from autotune.core.outcome import Completed, Effort, Failed, Measurement, Outcome, OutOfMemory
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.space.arms import applied_settings
from autotune.space.features import with_expandable_segments
from autotune.space.training_arguments import launch_variables, parallelism, training_arguments
from autotune.training import apply
from autotune.training.batches import stock_settings
from autotune.training.graphs import EAGER_MICRO_STEPS, GraphedSteps
from autotune.worker.arrays import arrays_in
from autotune.worker.dataset.prepared import BatchShape, PreparedDataset, Schedule
from autotune.worker.private.torch import set_allocator_settings
from autotune.worker.private.transformers import change_train_sampler
from autotune.worker.rendezvous import Ranks, prepare_deepspeed
from autotune.worker.trial.batch_shapes import BatchShapes
from autotune.worker.trial.build import (
    check_attends_to_all,
    check_devices,
    check_liger_knows,
    check_shared_by,
    model_for,
    shard_from_meta,
)
from autotune.worker.trial.cores import pin_to_one_core
from autotune.worker.trial.measure import StepTimer, micro_steps_to_run, most_steps, prefetched_steps
from autotune.worker.trial.meter import Arithmetic, Meter, Profiler, failure_of, most_host_bytes, open_meter
from autotune.worker.trial.step_checks import LossWatch, NotTrainedError, StepChecks
from autotune.worker.trial.synthetic import synthetic_ingredients
from autotune.worker.wrapping import after

Send = Callable[[Progress], None]

# c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: the size of every request is rounded up to a multiple of it.
_BLOCK_BYTES = 512
# The inputs of one step are freed only after those of the next are there, so two steps show the peak.
_EXCHANGES = 2


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
        """Report the end of the training, which may come before enough is measured."""
        self.timer.end()


class LeftOutInputs:
    """Takes the memory of the inputs that a whole step has on the device, so that the trial shows the same peak.

    It holds copies of a micro-step's inputs, one for each of ``micro_steps`` that the ``Trainer`` does not run.
    """

    def __init__(self, trainer: Any, micro_steps: int, on_batch: Callable[[Any], None] = lambda _: None) -> None:
        """Wrap the trainer's loading of batches, to copy inputs. ``on_batch`` is called with every batch."""
        self.micro_batch_bytes: int | None = None
        """Bytes that the inputs of the largest micro-step so far take on the device; ``None`` before the first step."""
        self._left_out = max(0, micro_steps - trainer.args.gradient_accumulation_steps)
        self._copies: list[list[torch.Tensor]] = []
        self._exchanges = 0
        self._device_type = trainer.args.device.type
        self._on_batch = on_batch
        after(trainer, "get_batch_samples", self._take)

    def _take(self, fetched: Any, *_: Any, **__: Any) -> None:
        """Copy the inputs of a step, where ``get_batch_samples`` returned them: a tuple that begins with their list."""
        if isinstance(fetched, tuple) and fetched and isinstance(fetched[0], list):
            self._hold(fetched[0])
            for inputs in fetched[0]:
                self._on_batch(inputs)

    def _hold(self, micro_batches: list[Any]) -> None:
        """Copy the largest of a step's inputs, if they are larger than the current copies.

        In the first two steps, inputs that are as large replace the copies, as in a whole step, to show the peak of
        such an exchange. Later steps are timed, and the copies stay, so that nothing is allocated in timed steps.
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
            self._copies = [[tensor.clone() for tensor in largest] for _ in range(self._left_out)]

    def _device_tensors(self, inputs: Any) -> Iterator[torch.Tensor]:
        """Return the tensors of a micro-batch that are on the device."""
        tensors = (array for array in arrays_in(inputs) if isinstance(array, torch.Tensor))
        return (tensor for tensor in tensors if tensor.device.type == self._device_type)


def _rounded_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes that torch's allocator takes for tensors."""
    return sum(-(-tensor.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES for tensor in tensors)


class Phases:
    """Times the phases of a trial, and reports each to the parent process as it begins."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._began_at = time.perf_counter()
        self.current = ""
        self.seconds: dict[str, float] = {}

    def enter(self, name: str) -> None:
        """End the current phase and begin another, reported to the parent."""
        self.end()
        self.current = name
        self._send(Progress(phase=name))

    def end(self) -> None:
        """Record the seconds of the current phase, if one has begun."""
        now = time.perf_counter()
        if self.current:
            self.seconds[self.current] = round(now - self._began_at, 4)
        self._began_at = now


def known_fields() -> set[str]:
    """Return the field names of the installed ``TrainingArguments``."""
    return {f.name for f in dataclasses.fields(TrainingArguments)}


def trainer_arguments(
    candidate: Candidate,
    device_kind: str,
    effort: Effort,
    output_dir: str,
    seed: int,
    *,
    repeats: int = 0,
    **fields: Any,
) -> Any:
    """Return a candidate's ``TrainingArguments`` for a trial, which reports and saves nothing.

    They allow the most steps that a trial may run, and ``repeats`` more. ``fields`` are further arguments.
    """
    arguments = training_arguments(candidate, known_fields(), device_kind)
    arguments["gradient_accumulation_steps"] = micro_steps_to_run(candidate, effort)
    return TrainingArguments(
        **arguments,
        output_dir=output_dir,
        max_steps=most_steps(candidate, effort) + repeats,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        **fields,
    )


class Trial:
    """Runs the training of one candidate, and measures it; ``send`` gets the progress."""

    def __init__(
        self, workload: Workload, work: TrialWork, scratch: Scratch, send: Send, ranks: Ranks | None = None
    ) -> None:
        self._workload = workload
        self._candidate = work.candidate
        self._effort = work.effort
        if work.candidate.arm.cuda_graphs:
            # Enough warm-up steps for the graphs to be captured in them.
            steps = 1 + math.ceil(EAGER_MICRO_STEPS / micro_steps_to_run(work.candidate, work.effort))
            self._effort = dataclasses.replace(work.effort, warmup_steps=max(work.effort.warmup_steps, steps))
        self._device_kind = work.devices.kind
        self._ranks = ranks or Ranks()
        self._uuid = work.devices.uuids[self._ranks.rank]
        self._cap_bytes = work.cap_bytes
        self._seed = work.seed
        self._data_folder = work.data_folder
        # Made by the server, which removes it together with the trial's TMPDIR.
        self._scratch = scratch
        # How many micro-batches of a shape take longer than later ones: a GPU takes up to seconds for a shape that is
        # new to it, as kernels are chosen, compiled and loaded.
        settles = 0
        if self._device_kind == "cuda":
            settles = EAGER_MICRO_STEPS + 1 if work.candidate.arm.cuda_graphs else 1
        self._shapes = BatchShapes(settles=settles)
        self._send = send
        self._phases = Phases(send)
        self._meter: Meter
        self._checks: StepChecks
        self._is_open = False
        """Whether the device is opened."""
        self._inputs: LeftOutInputs | None = None
        self._worst_steps = self._effort.warmup_steps
        """Number of the first warm-up steps, which are on the largest batches of a dataset."""
        self._cpu_core: int | None = None
        self._arithmetic = Arithmetic()
        self._host_bytes: int | None = None

    def run(self) -> Outcome:
        """Train, measure and return the outcome; errors of the training become a failure."""
        try:
            outcome = self._train(self._scratch.output_dir)
        except Exception as error:
            outcome = self._failure(error)
        self._phases.end()
        return dataclasses.replace(outcome, phase_seconds=self._phases.seconds)

    def _open_device(self) -> None:
        """Open the device, limit its memory, and install the checks."""
        self._phases.enter("device")
        if self._candidate.arm.cpu_affinity:
            # Before anything else, since threads inherit the pinning from the thread that starts them.
            self._cpu_core = pin_to_one_core(self._uuid)
        if self._device_kind == "cuda":
            # torch reads its variable only once, perhaps on import. Settings given here take effect at once.
            settings = with_expandable_segments(os.environ, expand=self._candidate.arm.expandable_segments)
            if settings is not None:
                set_allocator_settings(settings)
        self._meter = open_meter(self._device_kind, self._uuid, self._ranks.rank, self._ranks.count)
        self._is_open = True
        self._meter.limit(self._cap_bytes)
        set_seed(self._seed)
        self._checks = self._make_checks()
        self._checks.watch.install()

    def _make_checks(self) -> StepChecks:
        """Return the checks that judge whether each step trains; they raise ``NotTrainedError``."""

        def refuse(found: NotTrainedError) -> NoReturn:
            raise found

        return StepChecks("the Trainer", self._candidate.per_device_train_batch_size, refuse, until_timed=True)

    def _train(self, output_dir: str) -> Completed | OutOfMemory | Failed:
        """Build model and ``Trainer``, train until enough is measured, and return the outcome."""
        self._open_device()
        arm = self._candidate.arm
        os.environ.update(launch_variables(arm))
        prepared = self._open_dataset()
        schedule = self._schedule(prepared) if prepared else None
        self._phases.enter("model")
        if arm.zero_stage is not None:
            prepare_deepspeed(self._device_kind, self._ranks.count, offloads=arm.offloads_optimizer)
        fields = training_arguments(self._candidate, known_fields(), self._device_kind)
        make_arguments = functools.partial(
            trainer_arguments,
            self._candidate,
            self._device_kind,
            self._effort,
            output_dir,
            self._seed,
            repeats=schedule.repeats if schedule else 0,
            **(prepared.arguments if prepared else {}),
        )
        # Once transformers knows of ZeRO-3, it shards a model while it builds it.
        arguments = make_arguments() if arm.zero_stage == 3 else None
        model, is_on_meta = model_for(fields, self._workload, arm.attn_implementation, self._meter.device)
        self._meter.reset_peaks()
        self._phases.enter("trainer")
        if arm.use_liger_kernel:
            check_liger_knows(self._workload.model_type)
        if arm.context_parallel > 1:
            check_attends_to_all(model)
        arguments = arguments or make_arguments()
        check_devices(arguments, self._ranks.count)
        run = schedule.run if schedule else None
        timer = self._make_timer(lambda _: None, schedule=schedule, run=run, of=arguments.max_steps)
        if prepared is not None:
            ingredients = prepared.ingredients(model)
        else:
            micro_steps = arguments.gradient_accumulation_steps * arguments.max_steps
            samples = self._candidate.per_device_train_batch_size * micro_steps * arm.data_parallel
            ingredients = synthetic_ingredients(self._workload, model, samples, self._seed)
        trainer = Trainer(model=model, args=arguments, callbacks=[TrainerSteps(timer)], **ingredients)
        if schedule is not None:
            change_train_sampler(trainer, lambda _: schedule.order)
        if sizes := parallelism(arm):
            check_shared_by(trainer, sizes)
        if is_on_meta:
            shard_from_meta(trainer, self._workload)
        # The peak so far is that of building the model.
        self._host_bytes = most_host_bytes()
        apply(trainer, **applied_settings(arm))
        # FLOPs within compiled code and other libraries' kernels are not seen, and patches of images are no tokens.
        is_hidden = arm.torch_compile or arm.cuda_graphs or arm.use_liger_kernel or arm.fused_loss
        if not is_hidden and arm.context_parallel == 1 and self._workload.task != "image-text-to-text":
            self._arithmetic.count_first(trainer)
        if arm.cuda_graphs:
            self._watch_graphs(trainer.training_step)
        self._inputs = LeftOutInputs(trainer, self._candidate.gradient_accumulation_steps, timer.takes)
        watch = LossWatch(trainer)
        self._prepare(trainer)
        self._phases.enter("train")
        loss = None
        try:
            loss = float(trainer.train().training_loss)
        except Exception:
            # Perhaps only a step after the timed ones failed. With several ranks, others would wait for this one.
            if timer.timed_measurement is None or self._ranks.count > 1:
                raise
            traceback.print_exc()
        if (problem := watch.problem()) is not None:
            return Failed("non_finite", problem, during="train")
        if timer.timed_measurement is None:
            return Failed("error", "training ended before enough steps were measured", during="train")
        return self._completed(timer.timed_measurement, loss, trainer)

    def _prepare(self, trainer: Any) -> None:
        """Prepare a ``Trainer`` further before it trains; for subclasses."""

    def _make_timer(
        self, on_enough: Callable[[Measurement], None], *, of: int | None = None, **others: Any
    ) -> StepTimer:
        """Return the timer of the steps; ``of`` is the most of them, for progress; ``others`` go to ``StepTimer``."""
        return StepTimer(
            self._meter,
            self._candidate,
            self._effort,
            on_enough,
            on_step=lambda step: self._send(Progress(step=step, of=of)),
            checks=self._checks,
            shapes=self._shapes,
            profiler=Profiler() if self._meter.device.type == "cuda" else None,
            ranks=self._ranks,
            **others,
        )

    def _completed(self, measured: Measurement, train_loss: float | None, trainer: Any = None) -> Completed:
        """Return the outcome: the timer's measurement, completed by what the trial itself recorded.

        With a ``trainer``, settings of it that an export needs are added.
        """
        return Completed(
            dataclasses.replace(
                measured,
                train_loss=train_loss,
                cpu_core=self._cpu_core,
                micro_batch_bytes=self._inputs.micro_batch_bytes if self._inputs else None,
                host_bytes_to_build=self._host_bytes,
                sample_flops=self._sample_flops(),
                divides_loss=getattr(trainer, "divides_by_accumulation", False),
                stock_settings=tuple(stock_settings(trainer).items()) if trainer is not None else (),
            )
        )

    def _sample_flops(self) -> tuple[float, float] | None:
        """Return the FLOPs of an average sample without padding, of the forward pass and of both passes.

        ``None`` where none were counted.
        """
        counted, workload = self._arithmetic, self._workload
        if not counted.flops:
            return None
        samples = float(self._candidate.per_device_train_batch_size)
        if workload.is_text and counted.tokens is not None:
            lengths = workload.data.facts.lengths if workload.data is not None and workload.data.facts else None
            mean = lengths.mean if lengths is not None else workload.seq_len * (1 - workload.padding)
            samples = counted.tokens / mean
        return counted.forward_flops / samples, counted.flops / samples

    def _watch_graphs(self, steps: GraphedSteps) -> None:
        """Count replays of CUDA graphs as calls that the checks see, and their captures as new shapes."""
        steps.on_replay, steps.on_capture = self._checks.watch.take_replay, self._shapes.take_capture

    def _open_dataset(self) -> PreparedDataset | None:
        """Open the user's dataset, if there is one, and set the number of warm-up steps.

        Batches of different lengths need one more warm-up step, and at least three. Batches prefetched during the slow
        first steps say nothing about the speed of loading, so the steps that use them count as warm-up, too.
        """
        dataset = None
        if self._data_folder is not None:
            self._phases.enter("data")
            dataset = PreparedDataset(self._workload, self._data_folder)
            if dataset.varies:
                self._worst_steps = max(3, self._worst_steps + 1)
        # Steps whose batches may be prefetched when the first warm-up steps end.
        prefetched = prefetched_steps(self._candidate, self._effort)
        self._effort = dataclasses.replace(self._effort, warmup_steps=self._worst_steps + prefetched)
        return dataset

    def _schedule(self, dataset: PreparedDataset) -> Schedule:
        """Return the order of the dataset's samples in this trial, whose few steps stand for a long run."""
        candidate = self._candidate
        shape = BatchShape(
            candidate.per_device_train_batch_size,
            candidate.gradient_accumulation_steps,
            micro_steps_to_run(candidate, self._effort),
            self._worst_steps,
            self._effort.warmup_steps - self._worst_steps,
            most_steps(candidate, self._effort, are_alike=False) - self._effort.warmup_steps,
            visits=1 + self._shapes.settles if dataset.makes_new_shapes else 1,
            ranks=candidate.arm.data_parallel,
            joins=candidate.arm.padding_free,
            groups=candidate.arm.train_sampling_strategy is not None,
            multiple=candidate.arm.length_multiple or 1,
        )
        return dataset.schedule(shape, self._seed)

    def _failure(self, error: BaseException) -> OutOfMemory | Failed:
        """Return the outcome of this trial, which ended with an exception, and print the exception to the log."""
        meter = self._meter if self._is_open else None
        return failure_of(error, meter, self._phases.current, self._cap_bytes, on_cpu=self._device_kind == "cpu")
