"""Run once, in a loop of the user's own, what comes after its first steps: its longest batch and its validation.

The data of the training ends after a few steps, so that the loop goes on to what it does at the end of an epoch. Other
data loaded then is taken for the validation. Its loader gives up to three parts of its first batch, then whole batches,
and ends early.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from autotune.core.code_interface import Framework
from autotune.core.messages import Problem
from autotune.core.rehearsal import Evaluation, LastStep, LongestBatch, Part, Whole
from autotune.worker.arrays import cut
from autotune.worker.failures import first_line
from autotune.worker.private.torch import around_batches
from autotune.worker.trial.meter import growth_of
from autotune.worker.trial.training_watch import Listener, StepListener, TrainingWatch
from autotune.worker.user.inspection import length
from autotune.worker.user.loader_overlay import batch_of, key_of
from autotune.worker.user.loop_steps import LoopSteps, batch_samples
from autotune.worker.user.own_trial import OwnTrial
from autotune.worker.user.rehearsal import LARGE_PART, Parts, Rehearses
from autotune.worker.wrapping import after, around

# The time limit ends a validation only after more whole batches than this, which show memory growth. A choice.
_FEWEST = 8
# Most batches given of data that is neither the training's nor that of the first validation. A choice.
_OTHER_DATA = 2


class LoopRehearsal(Rehearses, OwnTrial):
    """A run of the user's loop through its longest batch and its validation, which ends with a ``Rehearsal``.

    A ``Rehearsal`` is the memory and time that a long training needs beyond its first steps.
    """

    parts: LoopParts | None = None
    """What gives the batches; ``None`` before the code is run."""

    def run_code(self, output_dir: str) -> None:
        """Run the user's code, and report the results if it returns before the process has ended."""
        super().run_code(output_dir)
        if self.parts is not None:
            self.parts.end()

    def _end_after(self, error: BaseException) -> NoReturn:
        """End the process with the results where the code left by ``SystemExit``; else as a trial ends."""
        if self.parts is not None and isinstance(error, SystemExit):
            self.parts.end()
        super()._end_after(error)

    def _loop_steps(self, accumulation: int | None, on_loader: Callable[[Any], None] = lambda _: None) -> LoopSteps:
        """Set up ``parts`` to give the loop's batches and to watch it; return steps that time nothing."""
        # Whether the steps really train is judged in trials.
        self._checks.watch.remove()
        self.parts = LoopParts(
            accumulation or 1, self._begins, self._source.framework, self._work, self._meter, self._finish
        )
        self._epoch_batches = self.parts.epoch_batches
        around_batches(self.parts.next_batch)
        after(DataLoader, "__iter__", self.parts.opened.__setitem__)
        watch = TrainingWatch()
        watch.begin_timed()
        watch.listener = self.parts
        watch.install(calls=False)
        return _NoSteps(self._source.name, accumulation, StepListener())

    def _overlay_loader(self, batch_size: int | None, *, least_batches: int = 0, accumulation: int = 1) -> None:
        """Set up the training loader; its length is that of the rehearsal's epoch, for loops that rely on it."""
        super()._overlay_loader(batch_size, accumulation=accumulation)

        def rehearsed_length(length: Callable[..., int], loader: Any) -> int:
            own, is_trained_with = length(loader), key_of(loader) == self._source.interface.loader_key
            return own if self.parts is None or not is_trained_with else self.parts.length_of_epoch(own)

        around(DataLoader, "__len__", rehearsed_length)


class _NoSteps(LoopSteps):
    """Gives a loop its batches without dividing it into steps."""

    def repeated(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the iterator over one epoch's batches, unlike the endless one of a trial."""
        return make_iterator()

    def micro_step_ends(self) -> None:
        """Do nothing."""


class LoopParts(Parts, Listener):
    """Gives the batches of a loop's loaders, and measures the memory of the training and the validation on them."""

    def __init__(self, accumulation: int, begin: Callable[[], None], framework: Framework, *args: Any) -> None:
        super().__init__(*args)
        # Lightning takes as many batches as it was told, not as many as come.
        self._counts_batches = framework == "lightning"
        # accelerate asks for a batch before it gives the previous one to the loop.
        self._asks_ahead = framework == "accelerate"
        self._begin = begin
        # First batches, given as they are: three steps, and two batches that a library may load ahead.
        self._plain_batches = 3 * accumulation + 2
        # Then at least a step on the longest batch, and again two batches ahead.
        whole_steps = -(-(self._plain_batches + accumulation + 2) // accumulation)
        self.epoch_batches = whole_steps * accumulation + (accumulation > 1)
        """Batches after which the training's data ends: whole steps; with accumulation, then an incomplete one."""
        self._accumulation = accumulation
        self._last_batch = self.epoch_batches
        self._own_batches: int | None = None
        """Batches of the script's own epoch if its last step is incomplete, else ``None``; set by the first update."""
        self._losses: deque[list[torch.Tensor]] = deque([[]], maxlen=3)
        """Absolute mean loss of each backward pass: lists for the last two steps, and one for the passes since."""
        self._trained_batches = 0
        """Batches given of the training's data."""
        self._training_data: list[Any] = []
        """Datasets that are trained with; empty before the first update."""
        self._latest_data: Any = None
        """The dataset of the latest batch before the first update."""
        self._other_data: list[Any] = []
        """Other datasets in this step."""
        self._data_before: list[Any] = []
        """Other datasets in the step before."""
        self._make_longest: Callable[[], Any] | None = None
        self._longest = LongestBatch(0, 0, None, fits=False, read=0, of=0)
        self._is_epoch_over = False
        self._validation_data: Any = None
        self.opened: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """The loaders, by the iterators over them."""
        self._validation_key: str | None = None
        """The key of the validation's loader; ``None`` where its batch size is not that of the first batch."""
        self._other_batches = 0
        self._whole_samples = 0
        """Samples of a whole batch of the validation."""
        self._first_batch: Any = None
        """The validation's first batch, given after parts of it; ``None`` once it is given."""
        self._whole_part = Part(1, 0, 0, 0.0)
        """The whole batches of the validation so far."""
        self._held_bytes: list[int | None] = []
        self._held_host_bytes: list[int | None] = []
        self._given_samples: list[int] = []
        """Samples of each batch of the validation so far."""
        self._fitting_samples = 0
        """The most samples of a validation batch whose peak was within the limit."""
        self._total_batches: int | None = None
        """Batches of the whole validation; ``None`` where its loader has no length."""

    def end_after(self, why: str, *, is_out_of_memory: bool) -> NoReturn:
        """End after an error: the part under way does not fit (out of memory), or is unknown (``why``)."""
        if self._validation_data is not None:
            if not is_out_of_memory:
                self._unknown.append(f"the validation: {why}")
                self.finish()
            settings = {"batch_size": self._fitting_samples} if self._fitting_samples else {}
            self.finish(evaluation=self._evaluation_with(None, settings))
        if self._make_longest is not None and is_out_of_memory:
            self.finish(longest=self._longest)
        self._answer(Problem(why))

    def end(self) -> NoReturn:
        """End the rehearsal with its results, once the loop has ended or trains on after the epoch."""
        if self._given_samples:
            self.finish(evaluation=self._evaluation())
        self._note_last_step()
        self._unknown.append("a validation: none came at the end of an epoch")
        self.finish()

    def backward_begins(self, tensors: Any) -> None:
        """Record the loss from which the backward pass begins."""
        first = tensors[0] if isinstance(tensors, list | tuple) else tensors
        self._losses[-1].append(first.detach().abs().mean())

    def optimizer_ends(self, optimizer: Any) -> None:
        """Begin the losses of another step, and record which datasets are trained with."""
        if self._losses[-1]:
            self._losses.append([])
        if not self._training_data and self._latest_data is not None:
            # The first update: the data of the latest batch is what it was trained with.
            self._training_data.append(self._latest_data)
            if self._own_batches is not None and self.length_of_epoch(self._own_batches) == self._own_batches:
                self._own_batches = None
            if self._own_batches is None and self._accumulation > 1 and not self._counts_batches:
                # Without an incomplete step the batch for it is left out. Lightning was told to expect that batch.
                self._last_batch -= 1
        if self._trained_batches <= self._plain_batches:
            # A dataset that comes in two successive steps is trained with, too.
            self._training_data += [data for data in self._other_data if any(data is one for one in self._data_before)]
            self._other_data, self._data_before = [], self._other_data

    def next_batch(self, load: Callable[[Any], Any], batches: Any, data: Any) -> Any:
        """Return a batch in place of a loader's own next one, ``load(batches)``; ``data`` is its dataset."""
        if not self._training_data:
            # Before the first update nobody knows which data is trained with: the latest is taken for it.
            if self._latest_data is None:
                self._begin()
            self._trained_batches = self._trained_batches + 1 if data is self._latest_data else 1
            self._latest_data, self._own_batches = data, length(batches)
            return load(batches)
        # A validation may be on the training's own data, too.
        may_train = torch.is_grad_enabled() or not self._is_epoch_over
        if may_train and any(data is each for each in self._training_data):
            if self._validation_data is not None:
                # Training goes on after the validation.
                self.end()
            return self._training_batch(load, batches, data)
        if not self._is_epoch_over and self._trained_batches <= self._plain_batches:
            # Perhaps trained with, too: see ``optimizer_ends``.
            self._other_data.append(data)
            return load(batches)
        if not self._is_epoch_over:
            self._end_epoch()
        return self._evaluation_batch(load, batches, data)

    def _training_batch(self, load: Callable[[Any], Any], batches: Any, data: Any) -> Any:
        """Return the next training batch, after the plain ones the longest. Raise ``StopIteration`` after the last."""
        if self._is_epoch_over:
            # Another epoch begins without a validation in between: this ends the process.
            self.end()
        self._trained_batches += 1
        if self._trained_batches == self._plain_batches + 1:
            self._find_longest(batches, data)
        if self._trained_batches > self._last_batch:
            self._end_epoch()
            raise StopIteration
        # The longest batch is made anew each time, since a loop may change a batch.
        return load(batches) if self._make_longest is None else self._make_longest()

    def length_of_epoch(self, batches: int) -> int:
        """Return the length that the loader of a real epoch of ``batches`` reports to the loop.

        Where the real epoch's last step is incomplete, it is that of the rehearsal's epoch, whose last step is
        incomplete, too: a loop may use the length to train that step rightly. Else it is ``batches``.
        """
        candidate = self._work.candidate
        # With fp16 a gradient scaler skips steps and changes the losses' factor: the last step is not judged.
        if self._accumulation == 1 or batches <= self.epoch_batches or candidate.arm.precision == "fp16":
            return batches
        of_rank = -(-batches // self._work.world_size)
        return self.epoch_batches if of_rank % candidate.gradient_accumulation_steps else batches

    def _note_last_step(self) -> None:
        """Record whether the loop trained the incomplete last step of the epoch wrongly: not at all, or misweighted."""
        if self._own_batches is None or self._trained_batches < self._last_batch or len(self._losses) < 3:
            return
        whole, last, without_step = self._losses
        if without_step:
            # The loop took no optimizer step after its last micro-batches.
            is_wrong = len(without_step) < len(last)
        else:
            # A correct loop divides each loss by the number of micro-batches: fewer make it larger by this factor.
            factor = len(whole) / max(1, len(last))
            ratio = float(torch.stack(last).mean() / torch.stack(whole).mean())
            # Its root lies halfway between 1, of a loop that divides by the whole accumulation, and the factor.
            is_wrong = factor > 1 and ratio < math.sqrt(factor)
        if is_wrong:
            batches = -(-self._own_batches // self._work.world_size)
            accumulation = self._work.candidate.gradient_accumulation_steps
            self._found = replace(self._found, last_step=LastStep(batches, accumulation, is_made=not without_step))

    def _end_epoch(self) -> None:
        """End the epoch: record the peak of the longest batch if there was one, then reset the peaks."""
        self._is_epoch_over = True
        self._meter.synchronize()
        peak = self._meter.peaks().reserved
        if self._make_longest is not None:
            fits = peak <= self._work.line_bytes
            self._found = replace(self._found, longest=replace(self._longest, peak_bytes=peak, fits=fits))
        self._make_longest = None
        self._reset()

    def _find_longest(self, batches: Any, data: Any) -> None:
        """Record the peak so far. If lengths differ, make the following training batches of the longest samples."""
        self._meter.synchronize()
        self._found = replace(self._found, peak_bytes=self._meter.peaks().reserved)
        try:
            chosen, longest = self.longest_of(data, self._work.candidate.per_device_train_batch_size)
        except Exception as error:
            self._unknown.append(f"the longest batch: {first_line(error)}")
            return
        if longest is not None:
            self._longest, collate = longest, batches._collate_fn
            self._make_longest = lambda: collate([data[index] for index in chosen])
            self._reset()

    def _evaluation_batch(self, load: Callable[[Any], Any], batches: Any, data: Any) -> Any:
        """Measure the validation so far, and return its next batch. Raise ``StopIteration`` after enough batches."""
        if self._validation_data is None:
            self._note_last_step()
            self._validation_data = data
            self._total_batches = length(batches)
            self._validation_began_at = self._whole_began_at = time.perf_counter()
        if data is not self._validation_data:
            self._other_batches += 1
            if self._other_batches > _OTHER_DATA:
                raise StopIteration
            return load(batches)
        self._measure(len(self._given_samples) - self._asks_ahead)
        whole, seconds = self._given_samples.count(self._whole_samples), time.perf_counter() - self._validation_began_at
        if whole >= LARGE_PART or (whole > _FEWEST and seconds > self._work.seconds):
            raise StopIteration
        if not self._given_samples:
            self._first_batch = load(batches)
            self._whole_samples = batch_samples(self._first_batch) or 0
            loader = self.opened.get(batches)
            asked = batch_of(loader) or 0
            if self._whole_samples == min(asked, length(data) or asked):
                self._validation_key = key_of(loader)
        # Parts of the first batch come first: an eighth, a quarter and a half of it. Each takes the place of a batch.
        most_parts = min(3, (self._total_batches or 4) - 1) if self._counts_batches else 3
        given = len(self._given_samples)
        part_samples = self._whole_samples >> 3 - given if given < most_parts else 0
        part = cut(self._first_batch, self._whole_samples, 0, part_samples) if part_samples else None
        if part is not None:
            self._given_samples.append(part_samples)
            return part
        batch = load(batches) if self._first_batch is None else self._first_batch
        self._first_batch = None
        self._given_samples.append(self._whole_samples)
        if not whole:
            self._whole_began_at = time.perf_counter()
        return batch

    def _measure(self, used: int) -> None:
        """Record the memory of the validation after the loop has run its first ``used`` batches."""
        if used <= 0:
            return
        self._meter.synchronize()
        peak = self._meter.peaks().reserved
        if peak <= self._work.line_bytes:
            self._fitting_samples = max(self._fitting_samples, self._given_samples[used - 1])
        whole = self._given_samples[:used].count(self._whole_samples)
        host = self._host_peak()
        if whole:
            self._trim()
            self._held_bytes.append(self._meter.allocated_bytes())
            self._held_host_bytes.append(host)
        self._whole_part = Part(max(1, whole), peak, host, time.perf_counter() - self._whole_began_at)

    def _evaluation_with(self, whole: Whole | None, settings: dict[str, int]) -> Evaluation:
        """Return the record of a validation: ``whole`` is its memory, and with ``settings`` it fits."""
        samples = None if self._total_batches is None else self._total_batches * self._whole_samples
        run, key, fits = len(self._given_samples), self._validation_key, self._does_fit(whole)
        return Evaluation(self._whole_samples, samples, run, whole, fits, settings, of_loop=True, loader_key=key)

    def _evaluation(self) -> Evaluation:
        """Return the memory of the whole validation, extrapolated from its first batches."""
        self._measure(len(self._given_samples))
        large, total = self._whole_part, self._total_batches or LARGE_PART
        left = max(0, total - large.batches)
        # Steady growth goes on to the end, as of outputs that are kept. Other growth ends with the first batches.
        kept, host = ((growth_of(held) or 0) * left for held in (self._held_bytes, self._held_host_bytes))
        seconds = large.seconds * (1 + left / large.batches)
        whole = Whole(large.device_bytes + kept, large.host_bytes + host, seconds, max(kept, host))
        is_large = large.device_bytes > self._work.line_bytes
        settings = {"batch_size": self._fitting_samples} if is_large and self._fitting_samples else {}
        return self._evaluation_with(whole, settings)
