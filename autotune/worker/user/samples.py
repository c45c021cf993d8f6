"""Read how long the samples of a user's own training are, and draw those of a trial from all over an epoch."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from autotune.core.lengths import MOST_SAMPLES, Order, SampleLengths
from autotune.worker.dataset.prepared import spread_positions
from autotune.worker.trial.batch_shapes import BatchShapes
from autotune.worker.user.loader_overlay import batch_of

# All samples are read where that is quick: trials then meet the longest. A dataset may make each as it is asked for, so
# the time is limited; 4,000 samples would tell how many shapes an epoch has. Choices.
_MOST_SAMPLES = 500_000
_MOST_SECONDS = 2.0
# Rows of a ``datasets.Dataset`` that are read at once.
_BLOCK = 1_000
_LONGEST = 64
_COLLATED = 3
_IDS, _MASK = "input_ids", "attention_mask"


def sample_lengths(dataset: Any, batches: Sequence[Any], batch: int, order: Order) -> SampleLengths | None:
    """Return the lengths of a dataset's samples; ``batches`` are examples from its collator.

    ``None`` where batches are not text. Lengths are read from random samples if these hold tokens, else from the
    batches.
    """
    texts = [made for made in batches if isinstance(made, Mapping) and getattr(made.get(_IDS), "ndim", 0) == 2]
    if not texts or len(texts) < len(batches):
        return None
    samples = len(dataset) if hasattr(dataset, "__len__") else None
    drawn = dict[int, int]()
    if samples is not None:
        some = random.Random(0).sample(range(samples), min(samples, _MOST_SAMPLES))
        drawn = read_lengths(dataset, some, _MOST_SECONDS)
    by_length = sorted(drawn, key=lambda index: -drawn[index])
    each = list(drawn.values()) or [tokens for made in texts for tokens in _real_lengths(made)]
    is_row = batch > 1 and all(len(made[_IDS]) == 1 for made in texts)
    if is_row and not drawn:
        return SampleLengths(unknown="its collator puts the samples of a batch in one row", samples=samples)
    return SampleLengths.of(
        each,
        samples=samples,
        order=order,
        padding="rows" if is_row else "longest",
        multiple=1 if is_row else _multiple(texts),
        longest_samples=tuple(by_length[:_LONGEST]),
    )


def lengths_of_trainer(trainer: Any, batches: Sequence[Any]) -> SampleLengths | None:
    """Return the lengths of a Trainer's samples; ``batches`` are examples from its loader."""
    asked = getattr(trainer.args, "train_sampling_strategy", None)
    grouped = asked == "group_by_length" or getattr(trainer.args, "group_by_length", False)
    order: Order = "batch_rebalance" if asked == "batch_rebalance" else "group_by_length" if grouped else "random"
    return sample_lengths(trainer.train_dataset, batches, trainer.args.train_batch_size, order)


def lengths_of_loader(loader: Any) -> SampleLengths | None:
    """Return the lengths of the samples of a loop's loader, from a few batches of random samples.

    ``None`` where the data has no length, is not text or raises an error, or the loader has no batch size.
    """
    dataset: Any = getattr(loader, "dataset", None)
    batch = batch_of(loader)
    if batch is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    draw = random.Random(0)
    try:
        indices = [[draw.randrange(len(dataset)) for _ in range(batch)] for _ in range(_COLLATED)]
        batches = [loader.collate_fn([dataset[index] for index in some]) for some in indices]
    except Exception:
        # Whatever their data and collator may raise.
        return None
    return sample_lengths(dataset, batches, batch, "random")


def read_lengths(dataset: Any, indices: Iterable[int], most_seconds: float) -> dict[int, int]:
    """Return the number of tokens by sample index, as far as read in time; empty for samples without tokens.

    Padding is left out where there is a mask.
    """
    columns = [name for name in (_IDS, _MASK) if name in (getattr(dataset, "column_names", None) or ())]
    is_stored = False
    if hasattr(dataset, "select_columns") and _IDS in columns:
        # Other columns may be images.
        dataset = dataset.select_columns(columns)
        # A transform may make other tokens of the columns.
        is_stored = getattr(dataset, "format", {}).get("type", "custom") != "custom"
    read = _stored_lengths(dataset, columns[-1], indices) if is_stored else _each_length(dataset, indices)
    end, found = time.monotonic() + most_seconds, dict[int, int]()
    # Whatever their data may raise: the loader has had other samples.
    with contextlib.suppress(Exception):
        for index, tokens in read:
            found[index] = tokens
            if time.monotonic() > end:
                break
    return found


def _each_length(dataset: Any, indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the index and number of tokens of each sample; stop at the first sample without tokens."""
    for index in indices:
        sample = dataset[index]
        if _IDS not in sample or getattr(sample[_IDS], "ndim", 1) != 1:
            return
        mask = sample.get(_MASK)
        yield index, len(sample[_IDS]) if mask is None else int(sum(mask))


def _stored_lengths(dataset: Any, column: str, indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the index and number of tokens of each sample, from a ``datasets.Dataset``'s column of tokens or masks."""
    from autotune.worker.dataset.columns import real_counts, token_counts

    table, left = dataset.with_format("arrow"), iter(indices)
    count = real_counts if column == _MASK else token_counts
    while block := list(itertools.islice(left, _BLOCK)):
        yield from zip(block, count(table[block][column]).tolist(), strict=True)


def _real_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each sample of a batch, without padding where there is a mask."""
    ids, mask = batch[_IDS], batch.get(_MASK)
    if mask is None or mask.shape != ids.shape:
        return [ids.shape[1]] * len(ids)
    return [int(tokens) for tokens in mask.sum(dim=1).tolist()]


def _multiple(batches: Sequence[Mapping[str, Any]]) -> int:
    """Return the power of two, or single length, to whose multiples batches are padded; 1 for the longest sample."""
    pairs = [(int(batch[_IDS].shape[1]), max(_real_lengths(batch))) for batch in batches]
    sizes = {padded for padded, _ in pairs}
    multiples = (1, *(sizes if len(sizes) == 1 else ()), *(1 << n for n in range(12, 0, -1)))
    fitting = (each for each in multiples if all(padded == -(-longest // each) * each for padded, longest in pairs))
    return next(fitting, 1)


# Samplers whose samples may be reordered. With others, consecutive samples may belong together.
_KNOWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN_NAMES = ("LengthGroupedSampler", "SeedableRandomSampler")


def can_spread(sampler: Any) -> bool:
    """Return whether the samples of a sampler may be reordered."""
    return type(sampler) in _KNOWN or type(sampler).__name__ in _KNOWN_NAMES


class SpreadSampler:
    """Yields the samples of another sampler, step by step in an order that stands for an epoch at any time.

    The first ``longest_steps`` steps have ``longest_each`` of the ``longest`` samples in each micro-batch, so that they
    reach the peak of memory. A later step that met new ``shapes`` is run again, until its shapes are known. A new
    iteration goes on where the last one stopped, also in the next epoch.
    """

    def __init__(
        self, sampler: Any, batch: int, step_samples: int, *, longest: Sequence[int] = (), longest_steps: int = 0,
        longest_each: int = 1, shapes: BatchShapes | None = None,
    ) -> None:  # fmt: skip
        self._sampler = sampler
        self._batch = batch
        self._step_samples = step_samples
        self._longest = itertools.cycle(longest) if longest else None
        self._longest_steps, self._longest_each = longest_steps, longest_each
        self._shapes = shapes or BatchShapes(settles=0)
        self._drawn: deque[tuple[Sequence[int], int]] = deque()
        """Samples of each step whose end was not looked at yet, and how often the step may be run again."""
        self._ended = len(self._shapes.ended)
        """Number of ended steps that were looked at."""
        self._endless = self._spread_indices()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        # What is left of an epoch after its whole steps would put all later steps between two of the order.
        whole = len(self) // self._step_samples * self._step_samples
        yield from itertools.islice(self._endless, whole)
        if whole < len(self):
            self._drawn.append(((), 0))
            yield from itertools.islice(self._sampler, len(self) - whole)

    def _spread_indices(self) -> Iterator[int]:
        """Yield sample indices until the sampler has none; see the class for their order."""
        left = self._longest_steps if self._longest is not None else 0
        while indices := list(itertools.islice(self._sampler, MOST_SAMPLES)):
            size = self._step_samples
            steps = [indices[at : at + size] for at in range(0, len(indices) - size + 1, size)] or [indices]
            places = dict.fromkeys(itertools.islice(spread_positions(len(steps)), len(steps)))
            spread = [steps[place] for place in places]
            for step in itertools.islice(itertools.cycle(spread), left):
                assert self._longest is not None
                self._drawn.append(((), 0))
                for at, one in enumerate(step):
                    yield next(self._longest) if at % self._batch < self._longest_each else one
            left = 0
            for step in spread:
                for again, times in self._with_new_shapes():
                    self._drawn.append((again, times - 1))
                    yield from again
                self._drawn.append((step, self._shapes.settles))
                yield from step

    def _with_new_shapes(self) -> Iterator[tuple[Sequence[int], int]]:
        """Yield the ended steps that had new shapes, with how often each may be run again, in the order of their end.

        Batches are drawn before earlier ones are trained on, so a step ends some steps after it was drawn.
        """
        while self._drawn and self._ended < len(self._shapes.ended):
            step, times = self._drawn.popleft()
            self._ended += 1
            if self._shapes.ended[self._ended - 1] and times:
                yield step, times


def spread_loader(loader: Any, accumulation: int, **options: Any) -> None:
    """Make a loader draw samples spread over the epoch, unless the data or a custom batch sampler decides them."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSampler and can_spread(batches.sampler):
        batch = batches.batch_size
        batches.sampler = SpreadSampler(batches.sampler, batch, batch * accumulation, **options)
