"""Derive the allocations of two optimizer steps, at any batch and accumulation, from the trace of one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.devices.gpus import Chip
from autotune.worker.fake.allocator import BLOCK_BYTES
from autotune.worker.fake.tracer import DEATH, EMPTY_CACHE, Events, Trace

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
    table: int | None = None
    """Where set, this is what the gradient of an embedding of so many rows is summed in, and the numbers above are
    indices."""

    def at(self, batch: int, chip: Chip) -> int:
        """Bytes at a batch."""
        size = self.per_sample * batch + self.constant
        if self.columns is None:
            return size
        if self.table is not None:
            return embedding_scratch_bytes(size, self.table, self.columns)
        return column_sum_scratch_bytes(size, self.columns, chip)


@dataclass(frozen=True)
class _Event:
    """A birth or a death in a sequence of two steps."""

    number: int
    origin: int
    """The allocation of the traced step that this one repeats, or is."""
    is_death: bool


class ScalableStep:
    """The allocations of an optimizer step at any per-device batch and accumulation."""

    def __init__(self, trace: Trace, batch: int) -> None:
        """From the trace of a step of two micro-steps at a telling batch: each size is taken as affine in the batch."""
        self._trace = trace
        self._sizes = {n: _size(trace, n, size, batch) for n, size in trace.events if size != DEATH}
        self._shift = max(self._sizes) + 1
        self._begins = min(trace.parts.values())
        self._inputs = _alive_after(trace.events[trace.parts["first inputs"] : trace.parts["second inputs"]])
        self._events: dict[int, list[_Event]] = {}

    def at(self, batch: int, chip: Chip, *, accumulation: int) -> Events:
        """The events of set-up and two optimizer steps of ``accumulation`` micro-steps at ``batch`` on ``chip``.

        The inputs of all micro-steps are there. Of the micro-steps themselves two stand for any number: later ones
        repeat the second.
        """
        sizes = {number: size.at(batch, chip) for number, size in self._sizes.items()}
        if accumulation not in self._events:
            self._events[accumulation] = self._two_steps(accumulation)
        events = [(e.number, DEATH if e.is_death else sizes[e.origin]) for e in self._events[accumulation]]
        # A trial begins to measure with an empty cache, once its model is built.
        return [*events[: self._begins], (0, EMPTY_CACHE), *events[self._begins :]]

    def label(self, number: int) -> str:
        """What an allocation is, in either step."""
        return self._trace.labels[number % self._shift]

    def micro_batch_bytes(self, batch: int, chip: Chip) -> int:
        """What the inputs of one micro-step take on the device, each tensor rounded as the allocator does."""
        return sum(_rounded(self._sizes[number].at(batch, chip)) for number in self._inputs)

    def _two_steps(self, accumulation: int) -> list[_Event]:
        """Set-up, the step, and the step again, without what the first leaves behind: optimizer state above all.

        The Trainer holds the inputs of one step until it has those of the next (``Trainer.get_batch_samples``).
        """
        setup = [_Event(number, number, size == DEATH) for number, size in self._trace.events[: self._begins]]
        loads, step = self._step(accumulation)
        born = {event.number for event in step if not event.is_death}
        ended = {event.number for event in step if event.is_death}
        repeated = born & ended
        again = [self._later(event, 1) for event in step if event.number in repeated]
        deaths = [_Event(event.number, event.origin, True) for event in loads]
        return [*setup, *loads, *step, *(self._later(event, 1) for event in loads), *deaths, *again]

    def _step(self, accumulation: int) -> tuple[list[_Event], list[_Event]]:
        """The inputs of all micro-steps, and everything else in a step, which ends before the inputs do."""
        inputs = [_Event(number, number, False) for number in self._inputs]
        # The first step's copies have even multiples of the shift, so that those of the second can have odd ones.
        loads = [self._later(event, 2 * number) for number in range(accumulation) for event in inputs]
        part = self._trace.events[self._trace.parts["first micro-step"] :]
        if accumulation == 1:
            part = _one_micro_step(self._trace)
        before = self._trace.events[self._begins : self._trace.parts["first micro-step"]]
        given = {number for number, size in before if size != DEATH}
        return loads, [_Event(number, number, size == DEATH) for number, size in part if number not in given]

    def _later(self, event: _Event, times: int) -> _Event:
        """The same event of a later copy of the allocation."""
        return _Event(event.number + times * self._shift, event.origin, event.is_death)


def _size(trace: Trace, number: int, size: int, batch: int) -> Size:
    value, columns = trace.column_sums.get(number, (size, None))
    table: int | None = None
    if number in trace.embeddings:
        value, table, columns = trace.embeddings[number]
    return Size(value // batch, 0, columns, table) if value % batch == 0 else Size(0, value, columns, table)


def _alive_after(events: Events) -> list[int]:
    """Allocations that these events begin and do not end, in order."""
    ended = {number for number, size in events if size == DEATH}
    return [number for number, size in events if size != DEATH and number not in ended]


def _one_micro_step(trace: Trace) -> Events:
    """The traced step from its first micro-step on, as it is without the second one.

    What dies in the second micro-step and was there before it, dies as well where there is none.
    """
    second = trace.events[trace.parts["second micro-step"] : trace.parts["update"]]
    absent = {number for number, size in second if size != DEATH}
    return [event for event in trace.events[trace.parts["first micro-step"] :] if event[0] not in absent]


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


# aten/src/ATen/native/cuda/Embedding.cu: the gradient of so few indices needs no scratch.
_FEW_INDICES = 3072
# NROWS_PER_THREAD in aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu.
_ROWS_A_THREAD = 10


def embedding_scratch_bytes(indices: int, rows: int, columns: int) -> int:
    """What CUDA sums the gradient of an embedding in: a float32 row for every index, and for every ten one more.

    embedding_backward_cuda_kernel allocates for the case that every index is another, up to the table's rows.
    """
    if indices <= _FEW_INDICES:
        return 0
    return 4 * columns * (indices // _ROWS_A_THREAD + min(indices, rows))


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
