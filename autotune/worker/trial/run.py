"""One trial: a real ``Trainer`` with the candidate's ``TrainingArguments``, measured or out of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainingArguments, set_seed

from autotune.core.candidate import Candidate, Document
from autotune.core.outcome import Completed, Effort, Failed, Measurement, OutOfMemory, outcome_document
from autotune.core.workload import Workload
from autotune.space.training_arguments import training_arguments
from autotune.worker.dataset.epoch_sample import BatchShape, Feed, Schedule
from autotune.worker.failures import classify
from autotune.worker.trial.affinity import pin_to_one_core
from autotune.worker.trial.build import build_model, check_liger_knows
from autotune.worker.trial.gpu_busy import BusyStep, busy_step
from autotune.worker.trial.inputs import LeftOutInputs
from autotune.worker.trial.losses import LossWatch
from autotune.worker.trial.measure import MeasureCallback, micro_steps_to_run, most_steps, steps_lying_ready
from autotune.worker.trial.meter import Meter, expand_segments, open_meter
from autotune.worker.trial.synthetic import synthetic_dataset

Send = Callable[[Document], None]


class Phases:
    """What a trial is doing, how long each part took, told to the parent as it goes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = time.perf_counter()
        self.current = ""
        self.seconds: dict[str, float] = {}

    def enter(self, name: str) -> None:
        """End the phase under way and begin another."""
        self.end()
        self.current = name
        self._send({"phase": name})

    def end(self) -> None:
        """End the phase under way."""
        now = time.perf_counter()
        if self.current:
            self.seconds[self.current] = round(now - self._started, 4)
        self._started = now


def trainer_arguments(
    candidate: Candidate,
    device_kind: str,
    effort: Effort,
    output_dir: str,
    seed: int,
    *,
    rehearsals: int = 0,
    **others: Any,
) -> Any:
    """The candidate's arguments, with reporting and saving off and enough steps to measure."""
    fields = {f.name for f in dataclasses.fields(TrainingArguments)}
    arguments = training_arguments(candidate, fields, device_kind)
    arguments["gradient_accumulation_steps"] = micro_steps_to_run(candidate, effort)
    return TrainingArguments(
        **arguments,
        output_dir=output_dir,
        max_steps=most_steps(candidate, effort) + rehearsals,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        **others,
    )


def _micro_steps(arguments: Any) -> int:
    """All that are run in a trial."""
    return int(arguments.gradient_accumulation_steps * arguments.max_steps)


def _train_as_far_as_it_is_measured(trainer: Any, callback: MeasureCallback) -> float | None:
    """Train; the mean loss, ``None`` where only the profiled step failed, after all that is needed was measured."""
    try:
        return float(trainer.train().training_loss)
    except Exception:
        if callback.pending is None:
            raise
        traceback.print_exc()
        return None


class Trial:
    """Everything between a job and its outcome, so that a failure knows the phase and the meter."""

    def __init__(self, job: Document, send: Send) -> None:
        self._workload = Workload.from_document(job["workload"])
        self._candidate = Candidate.from_parameters(job["candidate"])
        self._effort = Effort(**job["effort"])
        self._device_kind: str = job["device_kind"]
        self._uuid: str = job["device_uuid"]
        self._cap_bytes: int = job["cap_bytes"]
        self._seed: int = job["seed"]
        self._data_folder: str | None = job.get("data_folder")
        # The server makes it, and removes it together with the trial's TMPDIR.
        self._output_dir: str = job["output_dir"]
        self._send = send
        self._phases = Phases(send)
        self._meter: Meter | None = None
        self._inputs: LeftOutInputs | None = None
        self._worst_steps = self._effort.warmup_steps
        self._cpu_core: int | None = None

    def run(self) -> Document:
        """Train and measure; never raises for what training does."""
        # What another trial compiled would make this one's start-up look cheap.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "compiled")
        try:
            outcome = self._train(self._output_dir)
        except Exception as error:
            outcome = self._failure(error)
        self._phases.end()
        return outcome_document(dataclasses.replace(outcome, phase_seconds=self._phases.seconds))

    def _open_device(self) -> Meter:
        self._phases.enter("device")
        if self._candidate.arm.cpu_affinity:
            # First of all: threads that CUDA and torch start inherit it.
            self._cpu_core = pin_to_one_core(self._uuid)
        if self._device_kind == "cuda":
            expand_segments(self._candidate.arm.expandable_segments)
        meter = self._meter = open_meter(self._device_kind, self._uuid)
        meter.limit(self._cap_bytes)
        set_seed(self._seed)
        return meter

    def _train(self, output_dir: str) -> Completed | OutOfMemory | Failed:
        meter = self._open_device()
        feed = self._open_feed()
        self._phases.enter("model")
        model = build_model(self._workload, self._candidate.arm.attn_implementation, meter.device)
        meter.reset_peaks()
        self._phases.enter("trainer")
        if self._candidate.arm.use_liger_kernel:
            check_liger_knows(self._workload.model_type)
        schedule = self._schedule(feed) if feed else None
        arguments = trainer_arguments(
            self._candidate,
            self._device_kind,
            self._effort,
            output_dir,
            self._seed,
            rehearsals=schedule.rehearsals if schedule else 0,
            **(feed.arguments if feed else {}),
        )
        results: list[Measurement] = []
        callback = MeasureCallback(
            meter,
            self._candidate,
            self._effort,
            on_enough=results.append,
            on_step=lambda step: self._send({"step": step}),
            schedule=schedule,
            busy=self._busy_step(),
        )
        if feed is not None and schedule is not None:
            trainer = feed.trainer(model, arguments, callback, schedule)
        else:
            samples = self._candidate.per_device_train_batch_size * _micro_steps(arguments)
            dataset = synthetic_dataset(self._workload, model, samples, self._seed)
            trainer = Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[callback])
        if arguments.n_gpu > 1:
            raise RuntimeError(f"{arguments.n_gpu} GPUs are visible to the trial; exactly one was expected")
        self._hold_inputs(trainer)
        watch = LossWatch(trainer)
        self._phases.enter("train")
        loss = _train_as_far_as_it_is_measured(trainer, callback)
        if (problem := watch.problem()) is not None:
            return Failed("non_finite", problem, during="train")
        measured = results[0] if results else callback.pending
        if measured is None:
            return Failed("error", "training ended before enough steps were measured", during="train")
        return self._completed(measured, loss)

    def _busy_step(self) -> BusyStep | None:
        """What profiles a step after the timed ones, where that is asked for and the device can."""
        assert self._meter is not None
        if not self._effort.busy_steps:
            return None
        run = micro_steps_to_run(self._candidate, self._effort)
        return busy_step(self._meter, run, self._candidate.gradient_accumulation_steps)

    def _completed(self, measured: Measurement, train_loss: float | None) -> Completed:
        micro_batch_bytes = self._inputs.micro_batch_bytes if self._inputs else None
        return Completed(
            dataclasses.replace(
                measured, train_loss=train_loss, cpu_core=self._cpu_core, micro_batch_bytes=micro_batch_bytes
            )
        )

    def _hold_inputs(self, trainer: Any) -> None:
        """Have the inputs of micro-steps that the trial leaves out on the device, as in the whole step."""
        run = trainer.args.gradient_accumulation_steps
        self._inputs = LeftOutInputs(trainer, max(0, self._candidate.gradient_accumulation_steps - run))

    def _open_feed(self) -> Feed | None:
        """The user's data, where there is some; one more warm-up step where its batches differ."""
        if self._data_folder is None:
            return None
        self._phases.enter("data")
        feed = Feed(self._workload, self._data_folder)
        effort = self._effort
        self._worst_steps = max(3, effort.warmup_steps + 1) if feed.varies else effort.warmup_steps
        # What lies ready when the slow first steps are over says nothing of how fast more is loaded.
        ready = steps_lying_ready(self._candidate, effort)
        self._effort = dataclasses.replace(effort, warmup_steps=self._worst_steps + ready)
        return feed

    def _schedule(self, feed: Feed) -> Schedule:
        candidate = self._candidate
        shape = BatchShape(
            candidate.per_device_train_batch_size,
            candidate.gradient_accumulation_steps,
            micro_steps_to_run(candidate, self._effort),
            self._worst_steps,
            self._effort.warmup_steps - self._worst_steps,
            most_steps(candidate, self._effort) - self._effort.warmup_steps,
            # What a GPU does for shapes that are new to it (kernels are chosen, built, loaded) takes seconds.
            rehearses=feed.makes_new_shapes and self._device_kind == "cuda",
        )
        return feed.schedule(shape, self._seed)

    def _failure(self, error: BaseException) -> OutOfMemory | Failed:
        peaks = self._meter.peaks() if self._meter else (None, None)
        outcome = classify(
            error,
            during=self._phases.current,
            on_cpu=self._device_kind == "cpu",
            memory={
                "peak_allocated_bytes": peaks[0],
                "peak_reserved_bytes": peaks[1],
                "cap_bytes": self._cap_bytes,
            },
        )
        # The log is where people are sent to look; where memory has run out there may be none left for it.
        with contextlib.suppress(MemoryError):
            print(outcome.traceback if isinstance(outcome, Failed) else outcome.message, file=sys.stderr)
        return outcome


def run_trial(job: Document, send: Send) -> Document:
    """Run the job's candidate and return its outcome as a document; ``send`` gets progress records."""
    return Trial(job, send).run()
