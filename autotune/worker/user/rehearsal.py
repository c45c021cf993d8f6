"""Run once, with a ``Trainer``, what a long run does beyond its first steps, and end the process.

After a few steps, under the memory limit of a trial: the batch of the longest samples, the evaluation on parts of its
samples, a checkpoint. Meanwhile the memory of this process and of those that it has started is read. All ranks run the
same parts: each decides by the values of all ranks, so that none waits for a rank that does something else.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import psutil
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from autotune.core.messages import Problem, TrialWork
from autotune.core.outcome import Effort, Failed, Outcome, OutOfMemory
from autotune.core.rehearsal import (
    Evaluation,
    HostUse,
    LongestBatch,
    Part,
    Rehearsal,
    RehearsalWork,
    Saving,
    Whole,
    extrapolated,
)
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.worker.failures import first_line, is_out_of_memory
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial.meter import Meter, growth_of, most_host_bytes
from autotune.worker.trial.run import TrainerSteps, Trial
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.inspection import length
from autotune.worker.user.samples import read_lengths
from autotune.worker.user.trainer_fields import generates
from autotune.worker.user.trainer_trial import TrainerTrial, prevent_side_actions

# Fewest and most steps before the parts; memory growth is computed over them. The optimizer has its state after two.
# Choices.
_FEWEST_STEPS, _MOST_STEPS = 2, 24
# Batches of the largest part of an evaluation: at least, and at most as far as there is time. Choices.
_FEWEST_BATCHES, LARGE_PART = 4, 64
# A checkpoint of more takes long to write. A choice.
_MOST_SAVED_BYTES = 4 * 2**30
_SAVED_PER_WEIGHT = 3
"""Times the weights: with the two states of AdamW."""
_SAVED_BY_DEEPSPEED = 16
"""Bytes of a weight: itself, and float32 copies of it and of those states."""


Answer = Callable[[Rehearsal | Problem], NoReturn]
T = TypeVar("T")


class Parts:
    """Holds what a rehearsal (a run beyond the first steps of a training) has found so far, and ends it."""

    def __init__(self, work: RehearsalWork, meter: Meter, answer: Answer) -> None:
        self._work, self._meter, self._answer = work, meter, answer
        self._is_on_cpu = work.devices.kind == "cpu"
        self._began_at = time.monotonic()
        self._unknown: list[str] = []
        self._found = Rehearsal(line_bytes=work.line_bytes)

    def end_after(self, why: str, *, is_out_of_memory: bool) -> NoReturn:
        """End the process after an error, and report the part in which it arose."""
        raise NotImplementedError

    def finish(self, **found: Any) -> NoReturn:
        """End the process with the results."""
        seconds = round(time.monotonic() - self._began_at, 3)
        self._answer(replace(self._found, unknown=tuple(self._unknown), seconds=seconds, **found))

    def longest_of(self, data: Any, batch_size: int) -> tuple[list[int], LongestBatch | None]:
        """Return the indices of the longest samples of a dataset for one batch, and the record of this batch.

        Only samples whose lengths could be read in time count. No indices and ``None`` where all samples are as long,
        or the lengths are unknown.
        """
        samples = length(data)
        lengths = read_lengths(data, all_over(samples), self._work.seconds / 3) if samples is not None else {}
        if not lengths or samples is None:
            self._unknown.append("the longest batch: the lengths of its samples are not known")
            return [], None
        if len(set(lengths.values())) == 1 and len(lengths) == samples:
            return [], None
        chosen = sorted(lengths, key=lambda index: -lengths[index])[:batch_size]
        longest = max(lengths.values())
        return chosen, LongestBatch(len(chosen), longest, None, fits=False, read=len(lengths), of=samples)

    def _does_fit(self, whole: Whole | None) -> bool:
        """Return whether an evaluation is within the limits of device and host; ``None`` is one out of memory."""
        if whole is None or whole.device_bytes > self._work.line_bytes:
            return False
        return self._work.host_bytes is None or whole.host_bytes <= self._work.host_bytes

    def _trim(self) -> None:
        """On the CPU, return freed memory to the system, so that resident memory shows new allocations."""
        if self._is_on_cpu:
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)

    def _reset(self) -> None:
        """Free unused memory, and reset the peaks."""
        gc.collect()
        self._trim()
        self._meter.reset_peaks()

    def _host_peak(self) -> int:
        """Return this process's peak in the host's memory; 0 on the CPU, where the device's peak is that."""
        return 0 if self._is_on_cpu else most_host_bytes() or 0


class Rehearses(Trial):
    """A trial that ends with a ``Rehearsal``: what a long run needs beyond its first steps."""

    parts: Parts | None = None
    """What the rehearsal runs after the first steps; ``None`` before the training begins."""
    _finish: Answer

    def __init__(self, workload: Workload, work: RehearsalWork, *args: Any) -> None:
        trial = TrialWork(
            work.candidate, work.devices, work.cap_bytes, Effort(), work.seed, work.unmodified, work.data_folder
        )
        super().__init__(workload, trial, *args)
        self._work = work

    def _end(self, outcome: Outcome) -> NoReturn:
        """End the process with what was found so far, where the training ends as a trial would, such as by an error."""
        why = outcome.message if isinstance(outcome, Failed | OutOfMemory) else "it ended as a trial does"
        if self.parts is not None:
            self.parts.end_after(why, is_out_of_memory=isinstance(outcome, OutOfMemory))
        self._finish(Problem(why))


class NamedRehearsal(Rehearses):
    """A rehearsal of a model by name on several ranks."""

    def __init__(self, workload: Workload, work: RehearsalWork, scratch: Scratch, finish: Answer, ranks: Ranks) -> None:
        super().__init__(workload, work, scratch, lambda _: None, ranks)
        self._finish = finish

    def run_and_end(self) -> NoReturn:
        """Train, and end the process with the results."""
        self._end(self.run())

    def _prepare(self, trainer: Any) -> None:
        """Add the callback that runs the parts after two steps. The evaluation gets some of the training's samples."""
        # Steps are neither judged nor timed.
        self._checks.watch.remove()
        trainer.remove_callback(TrainerSteps)
        samples = 2 * self._candidate.per_device_train_batch_size * self._candidate.arm.data_parallel
        trainer.eval_dataset = part_of(trainer.train_dataset, (), samples)
        trainer.args.per_device_eval_batch_size = self._candidate.per_device_train_batch_size
        trainer.args.save_strategy = SaveStrategy.STEPS
        self.parts = _TrainerParts(trainer, _ProcessMemory(), self._ranks, self._work, self._meter, self._finish)
        self.parts.is_of_named_model = True
        trainer.add_callback(self.parts)


class TrainerRehearsal(Rehearses, TrainerTrial):
    """A rehearsal of the user's own ``Trainer``."""

    def run_code(self, output_dir: str) -> NoReturn:
        """Run the user's code up to and into ``Trainer.train``."""
        self._process_memory = _ProcessMemory()
        super().run_code(output_dir)

    def _prepare(self, trainer: Any) -> None:
        """Apply the candidate's settings, and add the callback that runs the parts after some steps."""
        if generates(trainer.args):
            raise UserCodeError("what it trains on is generated anew in each run")
        self._apply(trainer)
        self._checks.watch.remove()
        memory = self._process_memory
        self.parts = _TrainerParts(trainer, memory, self._ranks, self._work, self._meter, self._finish)
        trainer.add_callback(self.parts)
        # Enough steps for the parts to come.
        trainer.args.max_steps = max(trainer.args.max_steps, _MOST_STEPS)
        if trainer.args.save_strategy != "no":
            trainer.args.save_total_limit = None


class _TrainerParts(Parts, TrainerCallback):  # type: ignore[misc]
    """Runs a ``Trainer``'s evaluation, longest batch and checkpoint, after its first steps."""

    is_of_named_model = False
    """Whether the model is one by name, whose trials have met its longest batch, and which has no evaluation set."""

    def __init__(self, trainer: Any, process_memory: _ProcessMemory, ranks: Ranks, *args: Any) -> None:
        super().__init__(*args)
        self._trainer, self._process_memory, self._ranks = trainer, process_memory, ranks
        self._held_bytes: list[int | None] = []
        self._left_bytes: int | None = None
        """Device memory that stays allocated after the first part of an evaluation."""
        self._saving_began_at: float | None = None
        self._loader: Any = None

    def end_after(self, why: str, *, is_out_of_memory: bool) -> NoReturn:
        """End after an error: that of a checkpoint once saving has begun, else one of the training."""
        if self._saving_began_at is None:
            self._answer(Problem(why))
        if is_out_of_memory:
            lost = Saving(None, None, time.monotonic() - self._saving_began_at, fits=False)
            self._end_ranks(saving=lost)
            self.finish(saving=lost)
        self._unknown.append(f"a checkpoint: {why}")
        self._end_ranks()
        self.finish()

    def _end_ranks(self, **found: Any) -> None:
        """End with the results if there are several ranks, since others may wait for this one; else do nothing."""
        if self._ranks.count > 1:
            self.finish(**found, failed_rank=self._ranks.rank)

    def _of_ranks(self, what: str, value: T) -> list[T]:
        """Return the ``value`` of every rank; end where ranks do not call this for the same purpose, ``what``."""
        gathered = self._ranks.gather((what, value))
        if any(purpose != what for purpose, _ in gathered):
            self._answer(Problem("its ranks do not do the same"))
        return [of_rank for _, of_rank in gathered]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the memory before any process that loads data is started, and keep the training loader."""
        self._process_memory.first_bytes = self._process_memory.read(always=True)
        self._loader = kwargs.get("train_dataloader")
        self._meter.reset_peaks()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the memory after each step; run the parts after the last."""
        prevent_side_actions(control)
        self._trim()
        self._held_bytes.append(self._meter.allocated_bytes())
        self._process_memory.read(always=True)
        seconds = max(self._of_ranks("a step", time.monotonic() - self._began_at))
        # For one more step.
        has_time = seconds * (1 + 1 / state.global_step) < self._work.seconds
        most_steps = _FEWEST_STEPS if self.is_of_named_model else _MOST_STEPS
        if state.global_step < _FEWEST_STEPS or (state.global_step < most_steps and has_time):
            return
        peak = max(self._of_ranks("the steps", self._meter.peaks().reserved))
        self._found = replace(self._found, growth_bytes=growth_of(self._held_bytes), peak_bytes=peak)
        longest = None
        if not self.is_of_named_model:
            longest = self._guarded("the batch of the longest samples", self._longest)
        evaluation = self._guarded("the evaluation", self._evaluation)
        self._found = replace(self._found, longest=longest, evaluation=evaluation, host=self._host())
        if args.save_strategy == "no":
            self.finish()
        self._begin_saving(args, control)

    def _begin_saving(self, args: Any, control: Any) -> None:
        """Have a checkpoint written. End the process where it is too large for that, with its memory computed."""
        free_bytes = min(self._of_ranks("the disk", shutil.disk_usage(args.output_dir).free))
        if self._saved_bytes() > min(_MOST_SAVED_BYTES, free_bytes // 4):
            computed = self._computed_saving()
            if computed is None:
                self._unknown.append("a checkpoint: it is too large to be written here")
            self.finish(saving=computed)
        self._saving_began_at = time.monotonic()
        self._reset()
        control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prevent logging, evaluation and saving between epochs."""
        prevent_side_actions(control)

    def _guarded(self, name: str, part: Callable[[], Any]) -> Any:
        """Return the result of a part; ``None`` where the user's code raised, which is recorded."""
        try:
            return part()
        except Exception as error:
            self._unknown.append(f"{name}: {first_line(error)}")
        finally:
            # Whatever the part left behind must not add to the next one.
            with contextlib.suppress(Exception):
                self._trainer.model.zero_grad(set_to_none=True)
                self._trainer.model.train()
        return None

    def _host(self) -> HostUse | None:
        """Return the host memory of all processes; ``None`` if a rank started no other process, or without a limit."""
        limit = self._work.line_bytes if self._is_on_cpu else self._work.host_bytes
        if self._process_memory.processes == 1 or limit is None:
            return None
        args, batches, ranks = self._trainer.args, length(self._loader), self._ranks.count
        growth = growth_of(self._process_memory.readings)
        # Ranks load their data alike. A process that loads data may copy at most what there was at the start.
        return HostUse(
            self._process_memory.most_bytes * ranks,
            None if growth is None else growth * ranks,
            self._process_memory.processes * ranks,
            limit,
            None if batches is None else batches // args.gradient_accumulation_steps,
            args.dataloader_num_workers * self._process_memory.first_bytes * ranks,
        )

    def _longest(self) -> LongestBatch | None:
        """Train on the batch of the longest samples, and return its record with its peak memory, ``None`` if too much.

        Returns ``None`` where no batch is longer than others, or this is unknown.
        """
        loader, trainer = self._loader, self._trainer
        dataset: Any = getattr(loader, "dataset", None)
        if length(dataset) is None or getattr(loader, "collate_fn", None) is None:
            self._unknown.append("the longest batch: the data is streamed, or its loader makes batches of its own")
            return None
        by_length, longest = self.longest_of(dataset, trainer.args.train_batch_size)
        if longest is None or not all(self._of_ranks("the longest batch", longest is not None)):
            return None
        self._reset()
        peak: int | None = None
        try:
            # With accumulation, twice: gradients are already allocated in the second micro-step.
            for _ in range(min(2, self._work.candidate.gradient_accumulation_steps)):
                batch = loader.collate_fn([dataset[index] for index in by_length])
                (inputs,), items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
                trainer.training_step(trainer.model_wrapped, inputs, items)
            self._meter.synchronize()
            peak = max(self._of_ranks("its peak", self._meter.peaks().reserved))
        except Exception as error:
            if not is_out_of_memory(error, 1.0):
                raise
            self._end_ranks(longest=longest)
        return replace(longest, peak_bytes=peak, fits=peak is not None and peak <= self._work.line_bytes)

    def _evaluation(self) -> Evaluation | None:
        """Return the memory of an evaluation, with smaller settings if it does not fit; ``None`` without samples."""
        sets, args = self._trainer.eval_dataset, self._trainer.args
        if sets is None:
            return None
        data = max(sets.values(), key=lambda each: length(each) or 0) if isinstance(sets, Mapping) else sets
        samples = length(data)
        args.per_device_eval_batch_size = self._work.evaluation_batch or args.per_device_eval_batch_size
        if samples == 0:
            return None
        batch = args.per_device_eval_batch_size
        whole, run = self._whole_evaluation(data, samples, batch, args.eval_accumulation_steps)
        left_bytes, fits = self._left_bytes or 0, self._does_fit(whole)
        settings, with_settings = ({}, None) if fits else self._settings_that_fit(data, samples, whole)
        named = self.is_of_named_model
        return Evaluation(batch, samples, run, whole, fits, settings, with_settings, left_bytes, of_training_data=named)

    def _settings_that_fit(
        self, data: Any, samples: int | None, whole: Whole | None
    ) -> tuple[dict[str, int], Whole | None]:
        """Return settings with which the evaluation fits, and its memory with them; ``{}``, ``None`` where none do.

        ``whole`` is its memory with its own settings. A smaller batch takes less for each batch. Outputs that are kept
        may go to the host after some batches (``eval_accumulation_steps``).
        """
        args, limit_bytes = self._trainer.args, self._work.line_bytes
        batch, flushed_after = args.per_device_eval_batch_size, args.eval_accumulation_steps
        settings: dict[str, int] = {}
        while batch > 1 and (whole is None or whole.device_bytes - whole.kept_bytes > limit_bytes):
            batch //= 2
            settings["per_device_eval_batch_size"] = batch
            whole, _ = self._whole_evaluation(data, samples, batch, flushed_after)
        if not self._does_fit(whole) and whole is not None and whole.kept_bytes and not self._is_on_cpu:
            batches = -(-(samples or batch) // (batch * self._world))
            free_bytes = limit_bytes - (whole.device_bytes - whole.kept_bytes)
            # Half of it is filled: the rest is for fragments, and for labels of other lengths.
            fewer = max(1, int(batches * free_bytes / whole.kept_bytes / 2))
            if fewer != flushed_after:
                settings["eval_accumulation_steps"] = fewer
            whole, _ = self._whole_evaluation(data, samples, batch, fewer)
        return (settings, whole) if settings and self._does_fit(whole) else ({}, None)

    @property
    def _world(self) -> int:
        """Number of ranks among which samples are divided."""
        return max(1, int(self._trainer.args.world_size))

    def _whole_evaluation(
        self, data: Any, samples: int | None, batch: int, flushed_after: int | None
    ) -> tuple[Whole | None, int]:
        """Return the whole evaluation with these settings, and the most batches run; ``None`` if out of memory.

        It is extrapolated from parts of the evaluation, each of twice as many batches as the one before.
        """
        args, named = self._trainer.args, self.is_of_named_model
        own_settings = args.per_device_eval_batch_size, args.eval_accumulation_steps
        args.per_device_eval_batch_size, args.eval_accumulation_steps = batch, flushed_after
        batches = -(-samples // (batch * self._world)) if samples is not None else LARGE_PART
        parts: list[Part] = []
        try:
            first = self._longest_samples(data, samples)[:batch]
            while not parts or self._runs_more_than(parts[-1], batches):
                count = 2 * parts[-1].batches if parts else 1
                parts.append(self._evaluate_part(data, first, min(count, batches), batch))
        except Exception as error:
            if not is_out_of_memory(error, 1.0):
                raise
            self._end_ranks(evaluation=Evaluation(batch, samples, 0, None, fits=False, of_training_data=named))
            return None, 0
        finally:
            args.per_device_eval_batch_size, args.eval_accumulation_steps = own_settings
        # Memory is extrapolated on a line through two parts. What grows in the first batches may be something else than
        # outputs: of the lines through an early and a late part, the lower one counts.
        earlier = parts[1:-1] or parts
        wholes = (extrapolated(part, parts[-1], batches, flushed_after) for part in (earlier[0], earlier[-1]))
        return min(wholes, key=lambda whole: whole.device_bytes), parts[-1].batches

    def _longest_samples(self, data: Any, samples: int | None) -> list[int]:
        """Return the indices of an evaluation's samples, longest first; empty where all are as long or unknown."""
        if samples is None or not hasattr(data, "__getitem__"):
            return []
        lengths = read_lengths(data, all_over(samples), self._work.seconds / 3)
        return sorted(lengths, key=lambda index: -lengths[index]) if len(set(lengths.values())) > 1 else []

    def _runs_more_than(self, part: Part, batches: int) -> bool:
        """Return whether another part, of twice as many batches, is run of an evaluation that has ``batches``."""
        # Each rank keeps the outputs of all ranks, so that fewer batches of each are enough.
        is_in_time = part.batches < LARGE_PART // self._world and 2 * part.seconds <= self._work.seconds / 2
        return part.batches < batches and (is_in_time or part.batches < _FEWEST_BATCHES)

    def _evaluate_part(self, data: Any, first: Sequence[int], batches: int, batch: int) -> Part:
        """Evaluate ``batches``, beginning with the samples ``first``. The first time, record the memory left behind."""
        self._reset()
        before = self._meter.allocated_bytes()
        began_at = time.perf_counter()
        self._trainer.evaluate(eval_dataset=part_of(data, first, batches * batch * self._world))
        self._meter.synchronize()
        part = Part(batches, *self._peaks_of_ranks("an evaluation", time.perf_counter() - began_at))
        if self._left_bytes is None and before is not None:
            self._reset()
            left = max(0, (self._meter.allocated_bytes() or before) - before)
            # FSDP keeps the outermost module's weights whole after a forward pass; so does the next step.
            self._left_bytes = 0 if self._trainer.is_fsdp_enabled else left
        return part

    def _peaks_of_ranks(self, what: str, seconds: float) -> tuple[int, int, float]:
        """Return the largest device peak of all ranks, the sum of their host peaks, and the longest of their times."""
        measured = (self._meter.peaks().reserved, self._host_peak(), seconds)
        device_peaks, host_peaks, times = zip(*self._of_ranks(what, measured), strict=True)
        return max(device_peaks), sum(host_peaks), max(times)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the memory of this process and of those that load evaluation data."""
        self._process_memory.read()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End with the peak memory of the written checkpoint."""
        assert self._saving_began_at is not None
        peaks = self._peaks_of_ranks("a checkpoint", time.monotonic() - self._saving_began_at)
        self.finish(saving=self._saving(*peaks))

    def _saved_bytes(self) -> int:
        """Return the estimated size of a checkpoint in bytes."""
        parameters = list(self._trainer.model.parameters())
        if self._trainer.is_deepspeed_enabled:
            # With ZeRO-3 a rank holds only a part of each parameter: ``ds_numel`` is that of the whole.
            return _SAVED_BY_DEEPSPEED * sum(int(getattr(each, "ds_numel", each.numel())) for each in parameters)
        return _SAVED_PER_WEIGHT * sum(int(each.nbytes) for each in parameters)

    def _saving(self, device_bytes: int, host_bytes: int, seconds: float, *, is_computed: bool = False) -> Saving:
        """Return the record of a checkpoint with this memory and time, and whether it fits."""
        limit = self._work.host_bytes if self._ranks.count > 1 else None
        fits = device_bytes <= self._work.line_bytes and (limit is None or host_bytes <= limit)
        return Saving(device_bytes, host_bytes or None, seconds, fits, self._ranks.count, limit, is_computed)

    def _computed_saving(self) -> Saving | None:
        """Compute the memory of gathering FSDP's full state for a checkpoint; ``None`` for other trainings.

        Each device gathers one tensor after the other. The first rank keeps them in the host's memory: all weights,
        which are freed once they are written, then the whole state of the optimizer.
        """
        if not self._trainer.is_fsdp_enabled:
            return None
        weights = [each.nbytes for each in self._trainer.model.parameters()]
        states = [
            each.nbytes
            for state in self._trainer.optimizer.state.values()
            for each in state.values()
            if isinstance(each, torch.Tensor)
        ]
        self._reset()
        held = (self._meter.peaks().reserved, most_host_bytes() or 0)
        devices, hosts = zip(*self._of_ranks("what is held", held), strict=True)
        return self._saving(
            max(devices) + max(weights, default=0), sum(hosts) + max(sum(weights), sum(states)), 0.0, is_computed=True
        )


class _ProcessMemory:
    """The memory of this process and of those that it has started."""

    _EVERY_SECONDS = 0.2

    def __init__(self) -> None:
        self.readings: list[int | None] = []
        """Memory of all processes at each reading that was not left out, in bytes."""
        self._last_read_at = 0.0
        self.processes = 1
        self._start_bytes = 0
        self.most_bytes = 0
        self.first_bytes = 0
        """When the training began, before any process that loads data was started."""
        # The first reading is what later ones are compared with, and counts in no sum.
        self._start_bytes = self.read(always=True)
        self.readings.clear()
        self.most_bytes = 0

    def read(self, *, always: bool = False) -> int:
        """Record and return the memory of all processes beyond that at the start; 0 soon after the last reading."""
        if not always and time.monotonic() - self._last_read_at < self._EVERY_SECONDS:
            return 0
        processes = [None, *(child.pid for child in psutil.Process().children(recursive=True))]
        if len(processes) == self.processes == 1 and self.readings:
            # Of a training without other processes only the first reading counts.
            return 0
        total = sum(map(_own_bytes, processes)) - self._start_bytes
        self.processes = max(self.processes, len(processes))
        self.most_bytes = max(self.most_bytes, total)
        if always:
            self.readings.append(total)
        self._last_read_at = time.monotonic()
        return total


def _own_bytes(pid: int | None) -> int:
    """Return a process's anonymous and shared memory in bytes, without file pages; 0 where it cannot be read.

    Shared pages count proportionally (PSS), see proc_pid_smaps_rollup(5).
    """
    try:
        with open(f"/proc/{pid or 'self'}/smaps_rollup", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file if ":" in line and line.startswith("Pss_"))
    except OSError:
        return 0
    return sum(int(sizes[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem") if name in sizes)


def all_over(samples: int) -> Iterator[int]:
    """Yield the indices of about 64 samples spread over the data, then all others from the last to the first."""
    stride = max(1, samples // 64)
    yield from range(0, samples, stride)
    yield from (index for index in range(samples - 1, -1, -1) if index % stride)


def part_of(data: Any, first: Sequence[int], count: int) -> Any:
    """Return a dataset of ``count`` samples of ``data``, the indices ``first`` in front; of a stream the beginning."""
    samples = length(data)
    if samples is None or not hasattr(data, "__getitem__"):
        return data.take(count) if hasattr(data, "take") else _Stream(data, count)
    chosen = set(first)
    others = (index for index in range(samples) if index not in chosen)
    indices = [*first, *itertools.islice(others, max(0, count - len(first)))][:count]
    return data.select(indices) if hasattr(data, "select") else torch.utils.data.Subset(data, indices)


class _Stream(torch.utils.data.IterableDataset[Any]):
    """The beginning of a stream."""

    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._data), self._count)
