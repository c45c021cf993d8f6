"""Predict the peak memory of an arm at many batches, on fake tensors: no GPU, no memory, a few seconds."""

from __future__ import annotations

import contextlib
import os

import torch

from autotune.device.chips import Chip
from autotune.trial import Arm, Document
from autotune.worker.fake.allocator import CachingAllocator, OutOfCapError, replay
from autotune.worker.fake.scaling import ScalableTrace
from autotune.worker.fake.step import FakeTraining
from autotune.worker.fake.tracer import DEATH
from autotune.workload import Workload

# No batch of a free search is larger than this (autotune.space.LARGEST_FREE_BATCH).
_LARGEST_BATCH = 65536
_NICENESS = 19


def predict(job: Document) -> Document:
    """``batches``: a prediction for each batch asked; ``largest_batch`` of the ``multiple`` that stays under the line.

    The job names ``workload``, ``arm``, ``accumulates``, ``chip``, ``cap_bytes``, ``line_bytes``,
    ``batches`` and ``multiple`` (``None``: no need to know the largest).
    """
    yield_to_trials()
    chip = Chip.from_document(job["chip"])
    training = FakeTraining(
        Workload.from_document(job["workload"]), Arm(**job["arm"]), chip, accumulates=job["accumulates"]
    )
    limits = Limits(training.scalable(), chip, job["cap_bytes"], job["line_bytes"])
    multiple = job["multiple"]
    largest = limits.largest_batch(multiple) if multiple else None
    wanted = sorted({*job["batches"], *_around(largest, multiple)})
    return {
        "batches": [limits.prediction(batch) for batch in wanted],
        "largest_batch": largest,
    }


def yield_to_trials() -> None:
    """Run on one core and only when nobody else wants it: trials are being timed beside this."""
    torch.set_num_threads(1)
    os.nice(_NICENESS)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _around(largest: int | None, multiple: int | None) -> tuple[int, ...]:
    """The largest batch that fits and the first that does not."""
    if largest is None or multiple is None:
        return ()
    return (largest, largest + multiple) if largest else (multiple,)


class Limits:
    """What a trace says of batches under a cap and a line."""

    def __init__(self, trace: ScalableTrace, chip: Chip, cap_bytes: int, line_bytes: int) -> None:
        self._trace = trace
        self._chip = chip
        self._cap_bytes = cap_bytes
        self._line_bytes = line_bytes

    def fits(self, batch: int) -> bool:
        """Whether a step at this batch stays under the line without meeting the cap."""
        return bool(self.prediction(batch)["fits"])

    def prediction(self, batch: int) -> Document:
        """Peaks without a cap, whether it fits under the cap and the line, and what the peak consists of."""
        events = self._trace.at(batch, self._chip)
        free = replay(events)
        reserved, runs_out = free.peak_reserved_bytes, False
        if reserved > self._cap_bytes:
            reserved, runs_out = self._capped(events, free)
        return {
            "per_device_train_batch_size": batch,
            "peak_allocated_bytes": free.peak_allocated_bytes,
            "peak_reserved_bytes": reserved,
            "runs_out": runs_out,
            "fits": not runs_out and reserved <= self._line_bytes,
            "anatomy": anatomy(events, self._trace.labels),
        }

    def _capped(self, events: list[tuple[int, int]], free: CachingAllocator) -> tuple[int, bool]:
        """Peak reserved under the cap, where the allocator gives cached segments back; or that it runs out."""
        if free.peak_allocated_bytes > self._cap_bytes:
            return free.peak_reserved_bytes, True
        try:
            return replay(events, self._cap_bytes).peak_reserved_bytes, False
        except OutOfCapError:
            return free.peak_reserved_bytes, True

    def largest_batch(self, multiple: int) -> int:
        """The largest multiple that fits, below the first that does not; 0 where none does."""
        low, high = 0, multiple
        while high <= _LARGEST_BATCH and self.fits(high):
            low, high = high, high * 2
        while high - low > multiple:
            middle = (low + high) // 2 // multiple * multiple
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low


def anatomy(events: list[tuple[int, int]], labels: dict[int, str]) -> dict[str, int]:
    """Bytes by label at the moment when most was alive."""
    alive = peak = peak_at = 0
    size_of: dict[int, int] = {}
    for index, (number, size) in enumerate(events):
        if size == DEATH:
            alive -= size_of.pop(number)
        else:
            size_of[number] = size
            alive += size
            if alive > peak:
                peak, peak_at = alive, index
    parts: dict[str, int] = {}
    at_peak: dict[int, int] = {}
    for number, size in events[: peak_at + 1]:
        if size == DEATH:
            at_peak.pop(number)
        else:
            at_peak[number] = size
    for number, size in at_peak.items():
        parts[labels[number]] = parts.get(labels[number], 0) + size
    return parts
