"""Compute the shapes, tokens and padding of a training's batches from the lengths of its samples.

A shape (padded length) that a process has not run yet costs host time once, so that a run costs its tokens and its
shapes. Both follow from the lengths, the order of the samples and the padding. Orders are drawn with a seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Order = Literal["random", "group_by_length", "batch_rebalance"]
"""As ``TrainingArguments.train_sampling_strategy`` has it; ``random`` also stands for the order of the data."""
Padding = Literal["longest", "max_length", "rows"]
"""Pad to the longest sample of a micro-batch, to the longest sample of all, or not: samples come in one row."""

# An epoch is drawn from at most this many samples, and a run from as many: more change nothing but the time it takes.
MOST_SAMPLES = 100_000
# Largest number of different lengths that are recorded: longer samples have lengths rounded up to steps. A choice.
_MOST_COUNTS = 1024
# Numbers of first steps of a run in which new shapes are counted.
_STEP_COUNTS = (10, 30, 100, 300, 1000, 3000)
# Least multiple that ``choose_multiple`` considers: tensor cores take multiples of 8.
_LEAST_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """The lengths of a training's samples in tokens (of all or of some), and how its own settings make batches."""

    counts: tuple[tuple[int, int], ...] = ()
    """Each length in tokens, ascending, with the number of samples that have it."""
    samples: int | None = None
    """Samples of the training data; ``None`` where it has no length."""
    order: Order = "random"
    padding: Padding = "longest"
    multiple: int = 1
    """Padded lengths are multiples of this many tokens."""
    longest_samples: tuple[int, ...] = ()
    """Indices of the longest samples that were seen, the longest first."""
    unknown: str | None = None
    """Why the lengths could not be read; ``counts`` is empty then."""

    @classmethod
    def of(cls, lengths: Iterable[int], **others: Any) -> SampleLengths:
        """Count the lengths of samples, rounded up where samples are long; ``others`` are further fields."""
        counts = Counter(map(int, lengths))
        # So wide that there are at most _MOST_COUNTS different lengths.
        step = -(-max(counts, default=1) // _MOST_COUNTS)
        rounded: Counter[int] = Counter()
        for tokens, count in counts.items():
            rounded[-(-tokens // step) * step] += count
        return cls(tuple(sorted(rounded.items())), **others)

    @property
    def vary(self) -> bool:
        """Whether the samples differ in length."""
        return len(self.counts) > 1

    def long_in_row(self, batch: int, tokens: int) -> int:
        """Return about how many samples of a row are as long as the longest, if its others have the mean length.

        The row has ``tokens`` of ``batch`` samples.
        """
        mean = sum(length * count for length, count in self.counts) / sum(count for _, count in self.counts)
        long_samples = (tokens - batch * mean) / (self.longest - mean) if self.longest > mean else 1.0
        return min(batch, max(1, math.floor(long_samples)))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample; 0 without samples."""
        return self.counts[-1][0] if self.counts else 0

    def batching(self, batch: int, accumulation: int = 1, ranks: int = 1) -> Batching:
        """Return how the training's own order and padding make micro-batches of ``batch`` samples."""
        return Batching(batch, accumulation, ranks, self.order, self.padding, self.multiple)


@dataclass(frozen=True, slots=True)
class Batching:
    """How samples become micro-batches."""

    batch: int
    accumulation: int = 1
    ranks: int = 1
    order: Order = "random"
    padding: Padding = "longest"
    multiple: int = 1
    """Padded lengths, and rows, are filled up to a multiple of it."""

    def padded(self, lengths: Any, longest: int) -> Any:
        """Return the padded length of each micro-batch, from an array (…, samples) of lengths; ``longest``: of all."""
        import numpy as np

        if self.padding == "max_length":
            tokens = np.full(lengths.shape[:-1], longest)
        else:
            tokens = lengths.sum(axis=-1) if self.padding == "rows" else lengths.max(axis=-1)
        return -(-tokens // self.multiple) * self.multiple


@dataclass(frozen=True, slots=True)
class Shapes:
    """Numbers and sizes of the micro-batches of a run."""

    steps: int
    new: int
    """Micro-steps of the run in which a rank meets a shape for the first time."""
    mean_tokens: float
    """Tokens of a micro-batch, padding included."""
    longest_tokens: int
    """Tokens of the largest micro-batch."""
    padding: float
    """Share of the tokens that is padding."""
    new_in_steps: tuple[tuple[int, int], ...] = ()
    """Pairs of a number of first steps, ascending, and the number of new shapes in these steps."""
    seen: dict[int, int] = field(default_factory=dict)
    """Padded lengths, or lengths of rows, with the number of micro-batches that have each, ascending."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The whole training run for which a trial's speed is promised; ``None`` for what is not known of it."""

    steps: int | None = None
    """Its optimizer steps."""
    epochs: float | None = None
    """As asked for; ``None`` where the training says how many steps it takes."""
    new_shapes: int | None = None
    """See ``Shapes.new``."""
    epoch_shapes: int | None = None
    """New shapes of its first epoch."""
    new_in_steps: tuple[tuple[int, int], ...] = ()
    """See ``Shapes``."""
    step_tokens: float | None = None
    """Tokens of the mean step, padding included."""
    varies: bool = False
    """Whether its batches may differ in size."""
    long_samples: int = 1
    """About so many samples of its largest micro-batch are as long as the longest."""


def new_in_steps(shapes: Any, accumulation: int, steps: int) -> tuple[tuple[int, int], ...]:
    """Count the micro-steps with a new shape on a rank in the first 10, 30, 100 … optimizer steps of a run.

    ``shapes`` is an array (micro-steps, ranks): equal numbers are equal shapes. Each rank is a process of its own, and
    all wait for the slowest. Returns pairs of a number of steps and a count; the last is for all ``steps``, even where
    the array ends before: a later step hardly has a new shape.
    """
    import numpy as np

    # A micro-step in which several ranks meet new shapes costs the time of one.
    first_micro_steps = np.unique(np.concatenate([np.unique(of_rank, return_index=True)[1] for of_rank in shapes.T]))
    step_counts = [*(count for count in _STEP_COUNTS if count < steps), steps]
    return tuple((count, int(np.searchsorted(first_micro_steps, count * accumulation))) for count in step_counts)


def shapes_of(lengths: SampleLengths, batching: Batching, steps: int | None = None, seed: int = 0) -> Shapes:
    """Draw the micro-batches of a number of optimizer steps (by default an epoch), and return their shapes.

    At most about ``MOST_SAMPLES`` samples are drawn: a longer run meets hardly a new shape after so many. Raises
    ``ValueError`` where no length is known.
    """
    import numpy as np

    if not lengths.counts:
        raise ValueError("the lengths of the samples are not known")
    random = np.random.default_rng(seed)
    tokens, counts = np.array(lengths.counts).T
    samples = lengths.samples or int(counts.sum())
    # As many samples as the data has, so that each epoch of small data has the same lengths.
    population = np.repeat(tokens, counts)
    if samples != len(population):
        population = random.choice(population, min(samples, MOST_SAMPLES))
    step_samples = batching.batch * batching.accumulation * batching.ranks
    wanted = steps if steps is not None else max(1, samples // step_samples)
    drawn_steps = min(wanted, max(1, MOST_SAMPLES // step_samples))
    epochs: list[Any] = []
    while sum(map(len, epochs)) < drawn_steps:
        epochs.append(_epoch(random, population, batching))
    drawn = np.concatenate(epochs)[:drawn_steps]
    padded = batching.padded(drawn, lengths.longest)
    # Each length in ``padded`` is that of so many rows.
    rows = 1 if batching.padding == "rows" else batching.batch
    mean_tokens = float(padded.mean()) * rows
    values, times = np.unique(padded, return_counts=True)
    new = new_in_steps(padded.reshape(-1, batching.ranks), batching.accumulation, wanted)
    return Shapes(
        steps=wanted,
        new=new[-1][1],
        mean_tokens=mean_tokens,
        longest_tokens=int(padded.max()) * rows,
        padding=1 - float(drawn.sum(axis=-1).mean()) / mean_tokens,
        new_in_steps=new,
        seen=dict(zip(values.tolist(), times.tolist(), strict=True)),
    )


def _epoch(random: Any, population: Any, batching: Batching) -> Any:
    """Draw an epoch and return its lengths: an array (steps, micro-steps, ranks, samples of a micro-batch)."""
    import numpy as np

    step_samples = batching.batch * batching.accumulation
    order = random.permutation(population)
    if batching.order == "group_by_length":
        # As transformers' LengthGroupedSampler: stretches of 50 steps, or a quarter of the data, are sorted.
        stretch = step_samples * max(1, min(50, len(order) // (4 * step_samples)))
        order = np.concatenate([-np.sort(-order[at : at + stretch]) for at in range(0, len(order), stretch)])
    # Whole steps of all ranks: a last, incomplete one is cut off, and data smaller than a step is repeated.
    whole_step = step_samples * batching.ranks
    order = np.resize(order, max(1, len(order) // whole_step) * whole_step)
    if batching.order == "batch_rebalance":
        # Groups of batch_rebalance differ in size as well, which is left out.
        order = -np.sort(-order.reshape(-1, whole_step), axis=1)
    return order.reshape(-1, batching.accumulation, batching.ranks, batching.batch)


def choose_multiple(
    lengths: SampleLengths, batching: Batching, token_seconds: float, *, shape_seconds: float, steps: int | None = None
) -> int | None:
    """Return the power of two to whose multiples a run's batches are best padded; ``None`` where they are already.

    A token of a micro-batch costs ``token_seconds``; a shape that is new to the process costs ``shape_seconds``.
    """
    longest = lengths.longest * (batching.batch if batching.padding == "rows" else 1)
    powers = [2**n for n in range(longest.bit_length() + 1) if _LEAST_MULTIPLE <= 2**n < 2 * longest]

    def seconds(multiple: int) -> float:
        """Return the time of the run with padding to this multiple."""
        found = shapes_of(lengths, replace(batching, multiple=multiple), steps)
        micro_steps = found.steps * batching.accumulation
        return micro_steps * found.mean_tokens * token_seconds + found.new * shape_seconds

    # The present multiple first, which wins where others cost the same.
    best = min([batching.multiple, *powers], key=seconds)
    return best if best != batching.multiple else None
