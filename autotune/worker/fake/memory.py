"""Derive the allocations of steps at any batch from the trace of one, and the memory that CUDA's allocator reserves.

Rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp with its default settings.

The step is traced at a large prime batch. A traced size is a multiple of that prime exactly when it grows with the
batch.
"""

from __future__ import annotations

import base64
import bisect
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autotune.core.device import Chip
from autotune.core.prediction import Operations
from autotune.core.schema import decode, encode
from autotune.training.loss import pieces_of
from autotune.worker.fake.tracer import DEATH, Events, Trace

MIB = 1024**2
BLOCK_BYTES = 512
"""kMinBlockSize: the size of every request is rounded up to a multiple of it."""
_SMALL = MIB  # kSmallSize: requests up to this share small segments
_SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT = 20 * MIB  # kLargeBuffer: requests below _MIN_LARGE share these
_MIN_LARGE = 10 * MIB  # kMinLargeAlloc
_ROUND_LARGE = 2 * MIB  # kRoundLarge


class OutOfCapError(Exception):
    """Reserved memory would exceed its cap, even after every cached segment was freed."""


@dataclass(eq=False, slots=True)
class _Block:
    """A part of a segment, in use or free. Neighbours are linked, so that free ones can be merged."""

    address: int
    size: int
    small: bool  # in a segment of 2 MiB, for requests of up to 1 MiB
    stream: int
    previous: _Block | None = None
    next: _Block | None = None
    free: bool = True


class CachingAllocator:
    """Simulates CUDA's caching allocator: counts allocated and reserved bytes and their peaks.

    Its caller gives each allocation a number. Reserved bytes never exceed ``cap_bytes``, if given.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        self._cap = cap_bytes
        # Free blocks by stream and pool, sorted by size and address: a block is used again only in its own stream.
        self._free: defaultdict[tuple[int, bool], list[tuple[int, int, _Block]]] = defaultdict(list)
        self._alive: dict[int, _Block] = {}
        self._next_address = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0

    def allocate(self, number: int, size_bytes: int, stream: int = 0) -> None:
        """Allocate from the cache, else from a new segment. Raises ``OutOfCapError`` where that exceeds the cap."""
        size = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES or BLOCK_BYTES
        small = size <= _SMALL
        free = self._free[stream, small]
        at = bisect.bisect_left(free, (size, -1))
        block = free.pop(at)[2] if at < len(free) else self._new_segment(size, small, stream)
        if block.size != size:
            self._split(block, size)
        block.free = False
        self._alive[number] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes

    def release(self, number: int) -> None:
        """Free an allocation into the cache, and merge its block with free neighbours."""
        if (block := self._alive.pop(number, None)) is None:
            # ``replay`` leaves out allocations of 0 bytes, but not their releases.
            return
        self.allocated_bytes -= block.size
        block.free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                free = self._free[neighbour.stream, neighbour.small]
                free.pop(bisect.bisect_left(free, (neighbour.size, neighbour.address)))
                block = self._merge(block, neighbour)
        bisect.insort(self._free[block.stream, block.small], (block.size, block.address, block))

    def _new_segment(self, size: int, small: bool, stream: int) -> _Block:
        """Reserve a segment, and return its block. Raises ``OutOfCapError`` if the cap is too low for it."""
        if small:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _MIN_LARGE else -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if self._cap is not None and self.reserved_bytes + segment > self._cap:
            self._empty_cache()
            if self.reserved_bytes + segment > self._cap:
                raise OutOfCapError(f"{segment} bytes more than {self.reserved_bytes} of {self._cap}")
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = _Block(self._next_address, segment, small, stream)
        # A gap between segments keeps blocks of different segments from being merged.
        self._next_address += segment + BLOCK_BYTES
        return block

    def _empty_cache(self) -> None:
        """Free every segment that is entirely unused."""
        for pool, free in self._free.items():
            kept = [entry for entry in free if entry[2].previous is not None or entry[2].next is not None]
            self.reserved_bytes -= sum(entry[0] for entry in free) - sum(entry[0] for entry in kept)
            self._free[pool] = kept

    def _split(self, block: _Block, size: int) -> None:
        """Split the unused end off a block, if it is large enough."""
        remaining = block.size - size
        is_too_small = remaining < BLOCK_BYTES if block.small else remaining <= _SMALL
        if is_too_small:
            return
        rest = _Block(block.address + size, remaining, block.small, block.stream, previous=block, next=block.next)
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        bisect.insort(self._free[rest.stream, rest.small], (rest.size, rest.address, rest))

    @staticmethod
    def _merge(block: _Block, neighbour: _Block) -> _Block:
        """Merge two free neighbours into the block with the lower address, and return it."""
        first, second = (neighbour, block) if neighbour.address < block.address else (block, neighbour)
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        first.free = True
        return first


def replay(
    events: Iterable[tuple[int, int]], cap_bytes: int | None = None, stream_of: Callable[[int], int] | None = None
) -> CachingAllocator:
    """Simulate the allocations and releases of a trace, and return the allocator with its peaks.

    ``stream_of`` returns the CUDA stream of an allocation; ``None``: all are in the default stream. Raises
    ``OutOfCapError`` where reserved memory would exceed ``cap_bytes``.
    """
    allocator = CachingAllocator(cap_bytes)
    allocate, release = allocator.allocate, allocator.release
    for number, size in events:
        if size > 0:
            allocate(number, size, 0 if stream_of is None else stream_of(number))
        elif size == DEATH:
            release(number)
    return allocator


TRACED_BATCH = 10_007
"""The batch of traces: a prime. Dimensions of models are products of small primes, so that it divides none of them, and
one of 10,007 sums of parameters by accident. Attention over 1,000,000 tokens still has a size below 2**63."""


@dataclass(frozen=True)
class Size:
    """The bytes of an allocation as a function of the batch: an amount for each sample plus a constant."""

    per_sample: int = 0
    constant: int = 0
    columns: int | None = None
    """If set, this is the scratch memory of a sum over rows with so many columns; the amounts above then count rows."""
    logits: int | None = None
    """If set, the allocation is made for one piece of the logits at a time, and this is a sample's number of logits."""

    def at(self, batch: int, chip: Chip) -> int:
        """Return the bytes at a batch."""
        size = self.per_sample * batch + self.constant
        if self.logits is not None:
            # ``pieces_of`` multiplies tokens by words, and these are logits already.
            return -(-size // pieces_of(self.logits * batch, 1))
        if self.columns is None:
            return size
        return column_sum_scratch_bytes(size, self.columns, chip)


_Event = tuple[int, int | None]
"""For an allocation in a sequence of two steps: its number, and that of the traced allocation that it is or repeats.
For its release: its number and ``None``. Plain tuples, as there are tens of thousands for each accumulation."""


class ScalableStep:
    """The allocations of an optimizer step at any per-device batch and accumulation, from one traced step."""

    def __init__(self, trace: Trace, batch: int, alone: ScalableStep | None = None) -> None:
        """Take the trace of a step of two micro-steps at a batch; each size becomes affine in the batch.

        ``alone`` is a step of one micro-step, where that differs from the first of two: under FSDP only the last
        micro-step reduces its gradients.
        """
        self._trace = trace
        self._alone = alone
        self._sizes = {n: _size(trace, n, size, batch) for n, size in trace.events if size != DEATH}
        self._shift = max(self._sizes) + 1
        """What is added to the numbers of allocations once or more, to number those of a copied part of the step."""
        self._set_up_ends_at = trace.parts["first inputs"]
        loads = trace.events[self._set_up_ends_at : trace.parts["second inputs"]]
        released = {number for number, size in loads if size == DEATH}
        self._inputs = [number for number, size in loads if size != DEATH and number not in released]
        self._two_steps_of: dict[int, list[_Event]] = {}
        """The events of ``_two_steps`` by accumulation, made once each."""

    def step_for(self, accumulation: int) -> ScalableStep:
        """Return the step whose trace is used for this accumulation: its own labels and streams belong to it."""
        return self._alone if self._alone is not None and accumulation == 1 else self

    def at(self, batch: int, chip: Chip, *, accumulation: int) -> Events:
        """Return the events of set-up and two optimizer steps of ``accumulation`` micro-steps at ``batch`` on ``chip``.

        The inputs of all micro-steps are included, but the events of two micro-steps at most: all later ones repeat
        those of the second, and so reach the same peak.
        """
        if (step := self.step_for(accumulation)) is not self:
            return step.at(batch, chip, accumulation=accumulation)
        sizes = {number: size.at(batch, chip) for number, size in self._sizes.items()}
        if accumulation not in self._two_steps_of:
            self._two_steps_of[accumulation] = self._two_steps(accumulation)
        return [(n, DEATH if origin is None else sizes[origin]) for n, origin in self._two_steps_of[accumulation]]

    def label(self, number: int) -> str:
        """Return the kind (``weights``, ``activations``, …) of an allocation in either of the two steps."""
        return self._trace.labels[number % self._shift]

    @property
    def stream_of(self) -> Callable[[int], int] | None:
        """The function that returns an allocation's CUDA stream, 0 for the default; ``None``: all are in that one."""
        streams, shift = self._trace.streams, self._shift
        return (lambda number: streams.get(number % shift, 0)) if streams else None

    def micro_batch_bytes(self, batch: int, chip: Chip) -> int:
        """Return the device memory of one micro-step's inputs, with each tensor rounded as in the allocator."""
        sizes = (self._sizes[number].at(batch, chip) for number in self._inputs)
        return sum(-(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES for size_bytes in sizes)

    def _two_steps(self, accumulation: int) -> list[_Event]:
        """Return the events of set-up, of the first step, and of a second step without what persists (optimizer state).

        The Trainer keeps the inputs of one step until it has those of the next (``Trainer.get_batch_samples``).
        """
        loads, step = self._step(accumulation)
        allocated = {number for number, origin in step if origin is not None}
        released = {number for number, origin in step if origin is None}
        repeated = allocated & released
        second_step = self._renumbered([event for event in step if event[0] in repeated], 1)
        releases_of_loads: list[_Event] = [(number, None) for number, _ in loads]
        return [
            *_with_origins(self._trace.events[: self._set_up_ends_at]),
            *loads,
            *step,
            *self._renumbered(loads, 1),
            *releases_of_loads,
            *second_step,
        ]

    def _step(self, accumulation: int) -> tuple[list[_Event], list[_Event]]:
        """Return the events of the first step: the allocations of all micro-steps' inputs, and all later events."""
        inputs: list[_Event] = [(number, number) for number in self._inputs]
        # Copies of the first step have even multiples of the shift, so that those of the second can have odd ones.
        loads = [event for micro_step in range(accumulation) for event in self._renumbered(inputs, 2 * micro_step)]
        traced, parts = self._trace.events, self._trace.parts
        part = traced[parts["first micro-step"] :]
        if accumulation == 1:
            # Without the second micro-step. Allocations made before and released in it are released here, too.
            second = traced[parts["second micro-step"] : parts["update"]]
            absent = {number for number, size in second if size != DEATH}
            part = [event for event in part if event[0] not in absent]
        before = traced[self._set_up_ends_at : parts["first micro-step"]]
        traced_inputs = {number for number, size in before if size != DEATH}
        return loads, [event for event in _with_origins(part) if event[0] not in traced_inputs]

    def _renumbered(self, events: Iterable[_Event], times: int) -> list[_Event]:
        """Return the events with new numbers of allocations, for a copy; each ``times`` gives other numbers."""
        return [(number + times * self._shift, origin) for number, origin in events]


def _with_origins(traced: Events) -> list[_Event]:
    """Return traced events as those of a sequence of steps, in which each allocation is the traced one itself."""
    return [(number, None if size == DEATH else number) for number, size in traced]


def _size(trace: Trace, number: int, size: int, batch: int) -> Size:
    """Return a traced allocation's size as a function of the batch: constant unless a multiple of the traced batch."""
    # For the scratch memory of a sum, rows take the place of bytes.
    amount, columns = trace.column_sums.get(number, (size, None))
    if amount % batch:
        return Size(0, amount, columns)
    logits = trace.pieces.get(number)
    return Size(amount // batch, 0, columns, logits // batch if logits is not None else None)


def column_sum_scratch_bytes(rows: int, columns: int, chip: Chip) -> int:
    """Return the scratch memory of CUDA's reduction kernel that adds up ``rows`` rows of ``columns`` numbers.

    Bias gradients are such sums. Their scratch memory is as large as an activation: 32 MiB for 4096 rows of 1024
    columns on an H200. Every step and constant follows setReduceConfig and ReduceConfig::global_memory_size in
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


# A trace as text, so that one process can trace and others predict from it


def packed(trace: Trace, batch: int, operations: Operations) -> str:
    """Return the trace of a step at a batch, with the operations that it counted, as compressed text."""
    document = {"trace": encode(trace), "batch": batch, "operations": encode(operations)}
    return base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()


def unpacked(text: str) -> tuple[ScalableStep, Operations]:
    """Return the step and its operations from the text of ``packed``."""
    document = json.loads(zlib.decompress(base64.b64decode(text)))
    trace = decode(document["trace"], Trace)
    return ScalableStep(trace, document["batch"]), decode(document["operations"], Operations)
