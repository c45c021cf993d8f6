"""When training waits for its data, and which settings of the data loader to try then."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Effort, Measurement

LOADER_BOUND = 0.1
"""Waiting longer than this for data, as a share of a step, is worth a remedy."""

# torch's DataLoader prepares so many batches ahead in each of its processes unless told otherwise.
DEFAULT_PREFETCH_FACTOR = 2
_MORE_PREFETCH = 4
_FEWEST_WORKERS = 2


def plain_loader(arm: Arm) -> Arm:
    """The arm with the loader's defaults: what it computes, and the memory it needs, are the same."""
    return dataclasses.replace(arm, dataloader_num_workers=0, dataloader_prefetch_factor=None)


def waits_for_data(measured: Measurement) -> float:
    """The share of a step that passes before its batches are there."""
    return (measured.data_seconds or 0.0) / measured.step_seconds


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def next_loader(
    best: Candidate, measured: Measurement | None, tried: Collection[Candidate], cores: int, own_workers: int = 0
) -> Candidate | None:
    """The next variant of the best candidate whose data may come sooner; ``None`` where it hardly waits.

    Loading processes are doubled up to the cores for as long as that wins; then more is prefetched. An arm that
    says nothing of them loads with ``own_workers``, which the user's own code asks for.
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
    """The effort for an arm whose loading processes hand over batches in bursts, as many at once as there are."""
    if not arm.dataloader_num_workers:
        return effort
    return dataclasses.replace(
        effort,
        min_steps=max(effort.min_steps, 2 * arm.dataloader_num_workers),
        max_steps=max(effort.max_steps, 4 * arm.dataloader_num_workers),
        max_seconds=2 * effort.max_seconds,
    )


def batches_ahead(arm: Arm) -> int:
    """Micro-batches that can lie ready before they are asked for."""
    return arm.dataloader_num_workers * (arm.dataloader_prefetch_factor or DEFAULT_PREFETCH_FACTOR)
