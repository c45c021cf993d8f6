"""From the trace of one step at one batch to two steps at any batch, accumulating or not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.device.chips import Chip
from autotune.worker.fake.tracer import DEATH, Events, Trace

# Primes of which the dimensions of models are seldom multiples; small enough for 32-bit sizes.
_PRIMES = (61, 67, 71, 79, 83, 89, 97, 101, 103, 107)


class NoTellingBatchError(ValueError):
    """Every batch that would tell sizes with it from sizes without is a factor of the model's own dimensions."""


def telling_batch(numbers: Iterable[int]) -> int:
    """A batch of which none of the model's numbers is a multiple, nor their neighbours (a sequence less one, say).

    A size in a step at this batch is then a multiple of it exactly when the batch is a factor of it.
    """
    known = {neighbour for number in numbers for neighbour in (number - 1, number, number + 1)}
    for prime in _PRIMES:
        if not any(number % prime == 0 for number in known if number > 0):
            return prime
    raise NoTellingBatchError(f"each of {_PRIMES} divides some dimension")


@dataclass(frozen=True)
class Size:
    """An allocation's bytes: so many a sample, or so many whatever the batch."""

    per_sample: int = 0
    constant: int = 0
    columns: int | None = None
    """Where set, this is the scratch of a column sum of so many columns, and the numbers above are rows."""

    def at(self, batch: int, chip: Chip) -> int:
        """Bytes at a batch."""
        size = self.per_sample * batch + self.constant
        return size if self.columns is None else column_sum_scratch_bytes(size, self.columns, chip)


@dataclass(frozen=True)
class _Event:
    """A birth or a death in a sequence of two steps."""

    number: int
    origin: int
    """The allocation of the traced step that this one repeats, or is."""
    is_death: bool


class ScalableStep:
    """The allocations of an optimizer step at any per-device batch, with and without accumulation."""

    def __init__(self, trace: Trace, batch: int) -> None:
        """From the trace of a step of two micro-steps at a telling batch: each size is taken as affine in the batch."""
        self._sizes = {n: _size(trace, n, size, batch) for n, size in trace.events if size != DEATH}
        self._shift = max(self._sizes) + 1
        self._events = {accumulates: self._two_steps(trace, accumulates) for accumulates in (False, True)}
        self.labels = {**trace.labels, **{n + self._shift: label for n, label in trace.labels.items()}}
        """What each allocation is; those of the second step included."""

    def at(self, batch: int, chip: Chip, *, accumulates: bool) -> Events:
        """The events of set-up and two optimizer steps at ``batch`` on ``chip``."""
        sizes = {number: size.at(batch, chip) for number, size in self._sizes.items()}
        events = self._events[accumulates]
        return [(event.number, DEATH if event.is_death else sizes[event.origin]) for event in events]

    def _two_steps(self, trace: Trace, accumulates: bool) -> list[_Event]:
        """Set-up, the step, and the step again, without what the first leaves behind: optimizer state above all."""
        begins = min(trace.parts.values())
        setup = [_Event(number, number, size == DEATH) for number, size in trace.events[:begins]]
        step = [_Event(number, number, size == DEATH) for number, size in _step_events(trace, begins, accumulates)]
        born = {event.number for event in step if not event.is_death}
        ended = {event.number for event in step if event.is_death}
        repeated = born & ended
        again = [_Event(e.number + self._shift, e.number, e.is_death) for e in step if e.number in repeated]
        return setup + step + again


def _size(trace: Trace, number: int, size: int, batch: int) -> Size:
    value, columns = trace.column_sums.get(number, (size, None))
    return Size(value // batch, 0, columns) if value % batch == 0 else Size(0, value, columns)


def _step_events(trace: Trace, begins: int, accumulates: bool) -> Events:
    """The traced step, or what it is with one micro-step only."""
    if accumulates:
        return trace.events[begins:]
    parts = trace.parts
    left_out = [
        *range(parts["second inputs"], parts["first micro-step"]),
        *range(parts["second micro-step"], parts["update"]),
    ]
    absent = {trace.events[index][0] for index in left_out if trace.events[index][1] != DEATH}
    # What dies in the second micro-step and was there before it, dies as well where there is none.
    return [event for event in trace.events[begins:] if event[0] not in absent]


def column_sum_scratch_bytes(rows: int, columns: int, chip: Chip) -> int:
    """What CUDA's reduction kernel allocates beside its result when it sums ``rows`` rows into one.

    Bias gradients are such sums, and the scratch of one is as large as an activation: 32 MiB for
    4096 rows of 1024 on an H200. Follows setReduceConfig and ReduceConfig::global_memory_size in
    aten/src/ATen/native/cuda/Reduce.cuh for contiguous input; sums are accumulated in float32.
    """
    vector = next(v for v in (4, 2, 1) if columns % v == 0)
    threads = 512 // vector
    width = min(_last_power_of_two(columns // vector), 32)
    height = min(_last_power_of_two(rows), threads // width)
    width = min(_last_power_of_two(columns // vector), threads // height)
    if rows < min(height * 16, 256):
        return 0
    values_per_thread = -(-rows // height)
    grid = -(-(columns // vector) // width)
    target = chip.multiprocessors * (chip.threads_per_multiprocessor // (width * height))
    if values_per_thread < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values_per_thread // 16)), -(-values_per_thread // 256))
    return 4 * columns * blocks * width * vector if blocks > 1 else 0


def _last_power_of_two(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)
