"""Simulate CUDA's caching allocator: compute the memory that it reserves for a sequence of allocations.

Rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp with its default settings.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autotune.worker.fake.tracer import DEATH

MIB = 1024**2
BLOCK_BYTES = 512
"""kMinBlockSize: the size of every request is rounded up to a multiple of it."""
_SMALL = MIB  # kSmallSize: requests up to this share small segments
_SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT = 20 * MIB  # kLargeBuffer: requests below _MIN_LARGE share these
_MIN_LARGE = 10 * MIB  # kMinLargeAlloc
_ROUND_LARGE = 2 * MIB  # kRoundLarge


class OutOfCapError(Exception):
    """The cap was exceeded even after every cached segment was freed."""


@dataclass(eq=False, slots=True)
class _Block:
    """A block of a segment. Neighbours are linked, so that free ones can be merged."""

    address: int
    size: int
    small: bool
    stream: int
    previous: _Block | None = None
    next: _Block | None = None
    free: bool = True


class CachingAllocator:
    """Allocations by number, with allocated and reserved bytes and their peaks."""

    def __init__(self, cap_bytes: int | None = None) -> None:
        self._cap = cap_bytes
        # A block is used again in the stream that it was allocated in.
        self._free: defaultdict[tuple[int, bool], list[tuple[int, int, _Block]]] = defaultdict(list)
        self._alive: dict[int, _Block] = {}
        self._next_address = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0

    def allocate(self, number: int, size_bytes: int, stream: int = 0) -> None:
        """Allocate from the cache or a new segment. Raises ``OutOfCapError`` where both are impossible."""
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

    def holds(self, number: int) -> bool:
        """Return whether an allocation is alive; one of 0 bytes never is."""
        return number in self._alive

    def release(self, number: int) -> None:
        """Free an allocation into the cache, and merge it with free neighbours."""
        block = self._alive.pop(number)
        self.allocated_bytes -= block.size
        block.free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                free = self._free[neighbour.stream, neighbour.small]
                free.pop(bisect.bisect_left(free, (neighbour.size, neighbour.address)))
                block = self._merge(block, neighbour)
        bisect.insort(self._free[block.stream, block.small], (block.size, block.address, block))

    def _new_segment(self, size: int, small: bool, stream: int) -> _Block:
        """Allocate a new segment, emptying the cache if the cap requires it."""
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
        if remaining < BLOCK_BYTES if block.small else remaining <= _SMALL:
            return
        rest = _Block(block.address + size, remaining, block.small, block.stream, previous=block, next=block.next)
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        bisect.insort(self._free[rest.stream, rest.small], (rest.size, rest.address, rest))

    @staticmethod
    def _merge(block: _Block, neighbour: _Block) -> _Block:
        first, second = (neighbour, block) if neighbour.address < block.address else (block, neighbour)
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        first.free = True
        return first


def replay(
    events: Iterable[tuple[int, int]],
    cap_bytes: int | None = None,
    stream_of: Callable[[int], int] | None = None,
) -> CachingAllocator:
    """Simulate allocations and releases in order. Raises ``OutOfCapError`` where the cap is exceeded.

    ``stream_of`` returns the CUDA stream of an allocation; ``None`` means the default stream.
    """
    allocator = CachingAllocator(cap_bytes)
    allocate, release, holds = allocator.allocate, allocator.release, allocator.holds
    for number, size in events:
        if size > 0:
            allocate(number, size, 0 if stream_of is None else stream_of(number))
        elif size == DEATH and holds(number):
            release(number)
    return allocator
