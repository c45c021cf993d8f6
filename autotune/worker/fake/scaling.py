"""From the traces of two batches to that of any: every size is affine in the batch, or follows a rule."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.device.chips import Chip
from autotune.worker.fake.tracer import DEATH, Events, Trace


class UnalikeTracesError(ValueError):
    """The two steps did not allocate in the same order, so nothing can be said of a third."""


@dataclass(frozen=True)
class ScalableTrace:
    """The allocations of a training step at any per-device batch."""

    numbers: tuple[int, ...]
    sizes: tuple[tuple[int, int, int], ...]
    """For each event ``(at the first batch, at the second, kind)``; kind 0 is a size, 1 rows of a
    column sum, ``DEATH`` a death."""
    batches: tuple[int, int]
    labels: dict[int, str]
    columns: dict[int, int]

    @classmethod
    def of(cls, first: Trace, second: Trace, batches: tuple[int, int]) -> ScalableTrace:
        """Combine the traces of two batches; ``UnalikeTracesError`` where they allocate different things.

        Deaths are the first's: a cache that is cleared frees in the order of its hashes, which says nothing.
        """
        other_sizes = {number: size for number, size in second.events if size != DEATH}
        if first.labels.keys() != other_sizes.keys():
            raise UnalikeTracesError(f"{len(first.labels)} allocations at one batch, {len(other_sizes)} at another")
        sizes = []
        for number, size in first.events:
            if size == DEATH:
                sizes.append((0, 0, DEATH))
            elif number in first.column_sums:
                sizes.append((first.column_sums[number][0], second.column_sums[number][0], 1))
            else:
                sizes.append((size, other_sizes[number], 0))
        columns = {number: columns for number, (_, columns) in first.column_sums.items()}
        return cls(tuple(number for number, _ in first.events), tuple(sizes), batches, first.labels, columns)

    def at(self, batch: int, chip: Chip) -> Events:
        """The events of a step at ``batch`` on ``chip``; sizes below zero do not occur for positive batches."""
        low, high = self.batches
        events: Events = []
        for number, (size, other, kind) in zip(self.numbers, self.sizes, strict=True):
            if kind == DEATH:
                events.append((number, DEATH))
                continue
            value = size + (other - size) * (batch - low) // (high - low)
            events.append((number, column_sum_scratch_bytes(value, self.columns[number], chip) if kind else value))
        return events


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
