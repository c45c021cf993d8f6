"""Choose the samples of a trial: the largest batches first, then steps that represent a whole epoch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.core.dataset_spec import DataSpec
from autotune.core.measured_steps import StepEstimate
from autotune.core.statistics import quantile
from autotune.worker.private.transformers import length_grouped_order

# An epoch is drawn from at most this many samples: more take time to shuffle and change nothing.
_MOST_SAMPLES = 100_000
_MOST_TOKENS = 2**31


@dataclass(frozen=True)
class Schedule:
    """The order of a trial's samples, and what its measured steps represent."""

    order: tuple[int, ...]
    """Indices of samples, batch after batch."""
    worst_steps: int
    """Number of steps on the largest batches, which come first."""
    costs: tuple[float, ...]
    """Padded tokens of each measured step, in order; all equal where lengths do not vary."""
    epoch_cost: float
    """Padded tokens of the mean step of an epoch."""
    worst_tokens: int | None
    """Padded length of the largest batches; ``None`` for images."""
    new_lengths: tuple[int, ...] = ()
    """For each step after the warm-up, how many of its padded lengths no earlier step had; 0 where it is measured.

    A step with new lengths is a rehearsal: it is repeated, and measured then. Empty where nothing is rehearsed."""
    epoch_lengths: int = 1
    """Number of different padded lengths among the batches of an epoch."""

    @property
    def rehearsals(self) -> int:
        """Number of steps after the warm-up that are not measured."""
        return sum(1 for new in self.new_lengths if new)

    def estimate(self, seconds: list[float]) -> StepEstimate:
        """Estimate the mean step time of an epoch, in seconds; the half-width is infinite with fewer than two steps.

        Steps differ since their batches differ, which is known. A regression on padded tokens removes that part from
        the residuals, and corrects the mean where the measured steps are larger or smaller than the epoch's mean step.
        """
        mean = statistics.fmean(seconds)
        count = len(seconds)
        if count < 2:
            return StepEstimate(mean, math.inf)
        costs = np.array(self.costs[:count]) / self.epoch_cost
        slope, residuals, unknowns = 0.0, np.array(seconds) - mean, 1
        if count > 3 and costs.std() > 1e-6:
            slope = max(0.0, float(np.polyfit(costs, seconds, 1)[0]))
            residuals, unknowns = residuals - slope * (costs - costs.mean()), 2
        mean += slope * (1 - float(costs.mean()))
        error = float(np.sqrt((residuals**2).sum() / (count - unknowns) / count))
        return StepEstimate(mean, quantile(count - unknowns) * error / mean)


def _spread_positions(count: int) -> Iterator[int]:
    """Yield positions below ``count``, of which the first few are spread evenly at any time.

    The middle comes first, then one below and one above in turn (van der Corput's sequence, mirrored).
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
    rehearses: bool = False
    """Whether measured steps with new padded lengths are run twice."""
    ranks: int = 1
    """Processes that train together; accelerate gives them the batches in turn."""
    joins: bool = False
    """Whether the samples of a micro-step come in one row, without padding."""


def make_schedule(
    samples: int, lengths: Any, targets: Any, spec: DataSpec, seq_len: int, shape: BatchShape, seed: int,
    image_tokens: Any = None,
) -> Schedule:  # fmt: skip
    """Schedule the largest batches, then steps that are spread evenly over those of a shuffled or grouped epoch.

    ``lengths``, ``targets`` and ``image_tokens`` are arrays (samples,) of token counts, or ``None``; lengths include
    the tokens of images.
    """
    sizes = np.ones(samples, dtype=np.int64) if lengths is None else np.asarray(lengths)
    worst = _worst_steps(sizes, targets, image_tokens, shape)
    random = np.random.default_rng(seed)
    epoch = random.permutation(samples)[:_MOST_SAMPLES]
    step_samples = shape.batch * shape.micro_steps
    if spec.group_by_length and lengths is not None:
        epoch = epoch[length_grouped_order(sizes[epoch].tolist(), step_samples, seed)]
    step_samples *= shape.ranks
    epoch = np.resize(epoch, max(1, len(epoch) // step_samples) * step_samples)
    # Axes: step, micro-step, rank, sample.
    steps = epoch.reshape(-1, shape.micro_steps, shape.ranks, shape.batch)
    if shape.joins:
        # As many tokens as a batch of samples of the mean length has.
        padded = sizes[steps].mean(axis=3)
    else:
        longest = sizes[steps].max(axis=3)
        padded = longest if lengths is None else np.broadcast_to(spec.padded(longest, seq_len), longest.shape)
    # Inputs and targets are padded separately: both lengths in one number.
    shapes = padded
    if targets is not None:
        shapes = padded * _MOST_TOKENS + spec.padded(np.asarray(targets)[steps].max(axis=3), seq_len)
    micro_costs = shape.batch * padded
    # Ranks wait for each other once a step, so the one with the most to do decides.
    costs = micro_costs.sum(axis=1).max(axis=1)
    by_cost = np.argsort(costs, kind="stable")
    order, measured_costs, new_lengths = list(worst), [], []
    positions = _spread_positions(len(by_cost))
    worst_tokens = None if lengths is None else spec.padded(int(sizes.max()), seq_len)
    # The largest batches may have no attention mask, which makes them another shape than a padded batch as long.
    seen: set[int] = set()
    for step in random.choice(len(steps), shape.ordinary_steps):
        order += steps[step, : shape.micro_steps_run].reshape(-1).tolist()
        seen.update(shapes[step, : shape.micro_steps_run].reshape(-1).tolist())
    for _ in range(shape.measured_steps):
        step = by_cost[next(positions)]
        run = random.choice(shape.micro_steps, shape.micro_steps_run, replace=False)
        new = set(shapes[step, run].reshape(-1).tolist()) - seen if shape.rehearses else set()
        seen |= new
        order += steps[step, run].reshape(-1).tolist() * (2 if new else 1)
        measured_costs.append(float(micro_costs[step, run].mean(axis=0).max()) * shape.micro_steps)
        new_lengths += [len(new), 0] if new else [0]
    return Schedule(
        tuple(order),
        shape.worst_steps,
        tuple(measured_costs),
        float(costs.mean()),
        worst_tokens,
        tuple(new_lengths) if shape.rehearses else (),
        len(np.unique(shapes)),
    )


def _worst_steps(sizes: Any, targets: Any, image_tokens: Any, shape: BatchShape) -> list[int]:
    """Return the samples of the warm-up: every micro-step has the longest ones, the last step a mixture.

    The mixture has one longest sample among the shortest: as many padded tokens, but with an attention mask, which may
    select another attention kernel.
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
