"""Tell whether training waits for data, and choose which data loader settings to try then."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from functools import cache

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Effort, Measurement

LOADER_BOUND = 0.1
"""Share of a step spent waiting for data from which other data loader settings are tried. A choice."""

# Default of torch's DataLoader: batches that each worker prepares ahead.
DEFAULT_PREFETCH_FACTOR = 2
_MORE_PREFETCH = 4
_FEWEST_WORKERS = 2


@cache
def plain_loader(arm: Arm) -> Arm:
    """Return the arm with default data loader settings; computation and memory are the same."""
    return dataclasses.replace(arm, dataloader_num_workers=0, dataloader_prefetch_factor=None)


def waits_for_data(measured: Measurement) -> float:
    """Return the share of a step's time that is spent waiting for data."""
    return (measured.data_seconds or 0.0) / measured.step_seconds


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def next_loader(
    best: Candidate, measured: Measurement | None, tried: Collection[Candidate], cores: int, own_workers: int = 0
) -> Candidate | None:
    """Return the next data loader setting to try for the best candidate; ``None`` where it hardly waits for data.

    Workers are doubled up to the number of cores, as long as that is faster; then more batches are prefetched. An arm
    without workers loads with ``own_workers``, which the user's own code sets.
    """
    if measured is None or waits_for_data(measured) <= LOADER_BOUND:
        return None
    arm = best.arm
    workers = arm.dataloader_num_workers or own_workers
    variants = [dataclasses.replace(arm, dataloader_num_workers=max(_FEWEST_WORKERS, 2 * workers))]
    if arm.dataloader_num_workers:
        variants.append(dataclasses.replace(arm, dataloader_prefetch_factor=_MORE_PREFETCH))
    for variant in variants:
        candidate = dataclasses.replace(best, arm=variant)
        if variant.dataloader_num_workers <= cores and candidate not in tried:
            return candidate
    return None


def patience(effort: Effort, arm: Arm) -> Effort:
    """Return an effort with more steps for data loader workers, which deliver batches in bursts."""
    if not arm.dataloader_num_workers:
        return effort
    return dataclasses.replace(
        effort,
        min_steps=max(effort.min_steps, 2 * arm.dataloader_num_workers),
        max_steps=max(effort.max_steps, 4 * arm.dataloader_num_workers),
        max_seconds=2 * effort.max_seconds,
    )


def batches_ahead(arm: Arm) -> int:
    """Return how many micro-batches the workers may have prefetched."""
    return arm.dataloader_num_workers * (arm.dataloader_prefetch_factor or DEFAULT_PREFETCH_FACTOR)
