"""Predict the peak memory of an arm at many batches with fake tensors, in seconds and without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autotune.core.ceiling import PREDICTION_MARGIN, Bounds
from autotune.core.chip import Chip
from autotune.core.prediction import MemoryPrediction, Operations, PredictionAnswer, PredictionWork, spare_bytes
from autotune.core.workload import Workload
from autotune.worker.fake.memory import OutOfCapError, ScalableStep, replay, unpacked
from autotune.worker.fake.step import FakeTraining
from autotune.worker.fake.tracer import DEATH, Events

# Largest batch of a free search (autotune.space.space.LARGEST_FREE_BATCH).
_LARGEST_BATCH = 65536
_NICENESS = 19


def predict(work: PredictionWork, workload: Workload) -> PredictionAnswer:
    """Return a prediction for each requested batch, and the largest batch that fits."""
    # On one core at the lowest priority, since trials are timed at the same time.
    torch.set_num_threads(1)
    os.nice(_NICENESS)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # A collection takes a tenth of a second or more in a process with torch, and this one ends soon.
    gc.disable()
    operations: Operations | None
    if work.step is not None:
        step, operations = unpacked(work.step)
    else:
        # Random weights take the same memory, and need not be read.
        training = FakeTraining(dataclasses.replace(workload.at_its_worst(), weights=None), work.arm, work.chip)
        step, operations = training.step(), training.operations
    limits = Limits(step, work.chip, Bounds(work.cap_bytes, work.line_bytes), spare_bytes(work.arm, operations))
    wanted, largest = {*work.batches}, None
    if work.multiple:
        largest = limits.largest_batch(work.multiple)
        # And the next one, which does not fit.
        wanted |= {(batch, 1) for batch in (largest, largest + work.multiple) if batch}
    predicted = tuple(limits.prediction(batch, accumulation) for batch, accumulation in sorted(wanted))
    return PredictionAnswer(predicted, largest, operations)


@dataclass(frozen=True)
class _Peaks:
    """Peaks of a step in the simulated allocator."""

    allocated_bytes: int
    reserved_bytes: int
    runs_out: bool


class Limits:
    """Predicts which batches of a step fit under a cap and a line."""

    def __init__(self, step: ScalableStep, chip: Chip, bounds: Bounds, spare_bytes: int = 0) -> None:
        self._step = step
        self._chip = chip
        self._bounds = bounds
        self._spare_bytes = spare_bytes

    def prediction(self, batch: int, accumulation: int) -> MemoryPrediction:
        """Return the peaks at a batch, whether it fits, and the parts of the peak."""
        step = self._step.of(accumulation)
        events = step.at(batch, self._chip, accumulation=accumulation)
        peaks = self._peaks(events, step)
        return MemoryPrediction(
            batch,
            accumulation,
            micro_batch_bytes=self._step.micro_batch_bytes(batch, self._chip),
            peak_allocated_bytes=peaks.allocated_bytes,
            peak_reserved_bytes=peaks.reserved_bytes,
            runs_out=peaks.runs_out,
            fits=self._peaks_fit(peaks),
            anatomy=anatomy(events, step.label),
        )

    def _peaks_fit(self, peaks: _Peaks) -> bool:
        return not peaks.runs_out and self._bounds.fits(peaks.reserved_bytes + self._spare_bytes, PREDICTION_MARGIN)

    def _peaks(self, events: Events, step: ScalableStep) -> _Peaks:
        """Return the peaks without a cap if below it, else with the cap, which frees cached segments."""
        free = replay(events, stream_of=step.stream_of)
        if free.peak_reserved_bytes <= self._bounds.cap_bytes:
            return _Peaks(free.peak_allocated_bytes, free.peak_reserved_bytes, False)
        try:
            capped = replay(events, self._bounds.cap_bytes, step.stream_of)
        except OutOfCapError:
            return _Peaks(free.peak_allocated_bytes, free.peak_reserved_bytes, True)
        return _Peaks(free.peak_allocated_bytes, capped.peak_reserved_bytes, False)

    def _fits(self, batch: int) -> bool:
        """Return whether a step without accumulation fits at this batch."""
        step = self._step.of(1)
        events = step.at(batch, self._chip, accumulation=1)
        # What exists at once, unrounded, is a lower bound of reserved memory.
        return _peak(events)[0] <= self._bounds.line_bytes and self._peaks_fit(self._peaks(events, step))

    def largest_batch(self, multiple: int) -> int:
        """Return the largest multiple that fits, found by bisection; 0 where no batch fits."""
        low, high = 0, multiple
        while high <= _LARGEST_BATCH and self._fits(high):
            low, high = high, high * 2
        while high - low > multiple:
            middle = (low + high) // 2 // multiple * multiple
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low


def _peak(events: Events) -> tuple[int, int]:
    """Return the peak of allocated bytes, and the number of events until it."""
    alive = peak = peak_after = 0
    size_of: dict[int, int] = {}
    for index, (number, size) in enumerate(events, start=1):
        if size == DEATH:
            alive -= size_of.pop(number)
        else:
            size_of[number] = size
            alive += size
            if alive > peak:
                peak, peak_after = alive, index
    return peak, peak_after


def anatomy(events: Events, label: Callable[[int], str]) -> dict[str, int]:
    """Return the bytes of each kind of allocation at the peak."""
    parts: dict[str, int] = {}
    at_peak: dict[int, int] = {}
    for number, size in events[: _peak(events)[1]]:
        if size == DEATH:
            at_peak.pop(number)
        else:
            at_peak[number] = size
    for number, size in at_peak.items():
        parts[label(number)] = parts.get(label(number), 0) + size
    return parts
