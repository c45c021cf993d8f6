"""Choose the samples of a trial: the largest batches first, then steps that represent a whole epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.core.dataset_spec import DataSpec
from autotune.core.lengths import MOST_SAMPLES, PlannedRun, new_in_steps
from autotune.worker.private.transformers import length_grouped_order

_MOST_TOKENS = 2**31
GROUP = 3
"""So many steps of an epoch, a fast, a slow and a medium one, come one after the other, then once more. A choice."""


@dataclass(frozen=True)
class Schedule:
    """The order of a trial's samples, and what the epoch is that they stand for."""

    order: tuple[int, ...]
    """Indices of samples, batch after batch."""
    worst_steps: int
    """Number of steps on the largest batches, which come first."""
    repeats: int
    """Number of steps that come once more, so that their shapes are known to the GPU then."""
    worst_tokens: int | None
    """Padded length of the largest batches; ``None`` for images."""
    run: PlannedRun


def spread_positions(count: int) -> Iterator[int]:
    """Yield positions below ``count`` endlessly, evenly spread at any time.

    The middle comes first, then alternately one below and one above (van der Corput's sequence, mirrored).
    """
    yield count // 2
    for number in itertools.count(1):
        place, fraction, rest = 0.0, 0.25, number
        while rest:
            place += fraction * (rest & 1)
            rest, fraction = rest >> 1, fraction / 2
        yield int(place * count)
        yield count - 1 - int(place * count)


@dataclass(frozen=True)
class BatchShape:
    """How many samples and steps of each kind a trial has."""

    batch: int
    """Samples in a micro-step."""
    micro_steps: int
    """Micro-steps of the candidate's optimizer step."""
    micro_steps_run: int
    """Micro-steps that are run of them."""
    worst_steps: int
    ordinary_steps: int
    """Steps between those on the largest batches and the measured ones."""
    measured_steps: int
    visits: int = 1
    """How often steps with new padded lengths come."""
    ranks: int = 1
    """Processes that train together; accelerate gives them the batches in turn."""
    joins: bool = False
    """Whether the samples of a micro-step come in one row, without padding."""
    groups: bool = False
    """Whether samples of similar lengths come together, also where the dataset is not asked for so."""
    multiple: int = 1
    """To multiples of so many tokens a row is filled up, or batches are padded beyond their own rule."""


def make_schedule(
    samples: int, lengths: Any, targets: Any, spec: DataSpec, seq_len: int, shape: BatchShape, seed: int,
    image_tokens: Any = None,
) -> Schedule:  # fmt: skip
    """Return a schedule of the largest batches, then of steps spread evenly over an epoch.

    ``lengths``, ``targets`` and ``image_tokens`` are arrays (samples,) of token counts, or ``None``; lengths include
    the tokens of images.
    """
    sizes = np.ones(samples, dtype=np.int64) if lengths is None else np.asarray(lengths)
    worst = _worst_steps(sizes, targets, image_tokens, shape)
    random = np.random.default_rng(seed)
    epoch = random.permutation(samples)[:MOST_SAMPLES]
    step_samples = shape.batch * shape.micro_steps
    if (spec.group_by_length or shape.groups) and lengths is not None:
        epoch = epoch[length_grouped_order(sizes[epoch].tolist(), step_samples, seed)]
    step_samples *= shape.ranks
    epoch = np.resize(epoch, max(1, len(epoch) // step_samples) * step_samples)
    # Axes: step, micro-step, rank, sample.
    steps = epoch.reshape(-1, shape.micro_steps, shape.ranks, shape.batch)
    padded = sizes[steps].sum(axis=3) if shape.joins else sizes[steps].max(axis=3)
    if lengths is not None:
        own = padded if shape.joins else np.broadcast_to(spec.padded(padded, seq_len), padded.shape)
        padded = -(-own // shape.multiple) * shape.multiple
    # Inputs and targets are padded separately: both lengths in one number.
    shapes = padded
    if targets is not None:
        shapes = padded * _MOST_TOKENS + spec.padded(np.asarray(targets)[steps].max(axis=3), seq_len)
    micro_costs = padded * (1 if shape.joins else shape.batch)
    # Ranks wait for each other once a step, so the one with the most to do decides.
    costs = micro_costs.sum(axis=1).max(axis=1)
    by_cost = np.argsort(costs, kind="stable")
    order, repeats = list(worst), 0
    positions = spread_positions(len(by_cost))
    worst_tokens = None if lengths is None else spec.padded(int(sizes.max()), seq_len)
    # The largest batches may have no attention mask, which makes them another shape than a padded batch as long.
    seen: set[int] = set()
    for step in random.choice(len(steps), shape.ordinary_steps):
        order += steps[step, : shape.micro_steps_run].reshape(-1).tolist()
        seen.update(shapes[step, : shape.micro_steps_run].reshape(-1).tolist())
    for begin in range(0, shape.measured_steps, GROUP):
        again: list[int] = []
        for _ in range(begin, min(begin + GROUP, shape.measured_steps)):
            step = by_cost[next(positions)]
            run = random.choice(shape.micro_steps, shape.micro_steps_run, replace=False)
            taken, met = steps[step, run].reshape(-1).tolist(), set(shapes[step, run].reshape(-1).tolist())
            order += taken
            if not met <= seen:
                again += taken
                repeats += shape.visits - 1
            seen |= met
        order += again * (shape.visits - 1)
    of_epoch = max(1, samples // step_samples)
    new = new_in_steps(shapes.reshape(-1, shape.ranks), shape.micro_steps, of_epoch)
    return Schedule(
        tuple(order),
        shape.worst_steps,
        repeats,
        worst_tokens,
        PlannedRun(of_epoch, 1.0, new[-1][1], new[-1][1], new, float(costs.mean()), lengths is not None),
    )


def _worst_steps(sizes: Any, targets: Any, image_tokens: Any, shape: BatchShape) -> list[int]:
    """Return the samples of the warm-up: the longest in every micro-step, and a mixture in the last step.

    The mixture has one longest sample among the shortest: equally many padded tokens, but with an attention mask, which
    may select another attention kernel.
    """
    descending = np.argsort(-sizes, kind="stable")
    longest = descending
    if targets is not None:
        # Alternate the longest inputs and the longest targets, so that a batch is as large in both.
        by_target = np.argsort(-np.asarray(targets), kind="stable")
        longest = np.column_stack((descending, by_target)).reshape(-1)
    if image_tokens is not None:
        # One longest sample has the others padded to its length. Of images, which are not padded, as many as there can
        # be.
        longest = np.concatenate((descending[:1], np.argsort(-np.asarray(image_tokens), kind="stable")))
    full = np.resize(longest, shape.batch)
    heads = longest[: 1 if targets is None else 2]
    mixed = np.concatenate((heads, descending[::-1]))
    mixed = np.resize(mixed, shape.batch)
    micro_steps = [full] * shape.micro_steps_run * (shape.worst_steps - 1) + [mixed] * shape.micro_steps_run
    if shape.worst_steps < 3:
        micro_steps = [full] * shape.micro_steps_run * shape.worst_steps
    return [int(index) for micro_step in micro_steps for index in np.tile(micro_step, shape.ranks)]
