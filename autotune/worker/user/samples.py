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


def sample_lengths(dataset: Any, batches: Sequence[Any], batch_size: int, order: Order) -> SampleLengths | None:
    """Return the lengths in tokens of a dataset's samples, and how its collator pads batches.

    ``batches`` are some batches of ``batch_size`` samples from the collator; ``None`` where they are not text. Lengths
    are read from random samples if these hold tokens, else from the batches.
    """
    texts = [batch for batch in batches if isinstance(batch, Mapping) and getattr(batch.get(_IDS), "ndim", 0) == 2]
    if not texts or len(texts) < len(batches):
        return None
    samples = len(dataset) if hasattr(dataset, "__len__") else None
    length_by_index = dict[int, int]()
    if samples is not None:
        some = random.Random(0).sample(range(samples), min(samples, _MOST_SAMPLES))
        length_by_index = read_lengths(dataset, some, _MOST_SECONDS)
    longest_first = sorted(length_by_index, key=lambda index: -length_by_index[index])
    lengths = list(length_by_index.values()) or [tokens for batch in texts for tokens in _real_lengths(batch)]
    has_one_row = batch_size > 1 and all(len(batch[_IDS]) == 1 for batch in texts)
    if has_one_row and not length_by_index:
        return SampleLengths(unknown="its collator puts the samples of a batch in one row", samples=samples)
    return SampleLengths.of(
        lengths,
        samples=samples,
        order=order,
        padding="rows" if has_one_row else "longest",
        multiple=1 if has_one_row else _pad_multiple(texts),
        longest_samples=tuple(longest_first[:_LONGEST]),
    )


def lengths_of_trainer(trainer: Any, batches: Sequence[Any]) -> SampleLengths | None:
    """Return the lengths of a Trainer's samples, and in which order it draws them; ``batches`` are of its loader."""
    strategy = getattr(trainer.args, "train_sampling_strategy", None)
    # Older versions of transformers have the field ``group_by_length``.
    grouped = strategy == "group_by_length" or getattr(trainer.args, "group_by_length", False)
    order: Order = "batch_rebalance" if strategy == "batch_rebalance" else "group_by_length" if grouped else "random"
    return sample_lengths(trainer.train_dataset, batches, trainer.args.train_batch_size, order)


def lengths_of_loader(loader: Any) -> SampleLengths | None:
    """Return the lengths of the samples of a loop's loader, for which a few batches of random samples are collated.

    ``None`` where the data has no length, is not text or raises an error, or the loader has no batch size.
    """
    dataset: Any = getattr(loader, "dataset", None)
    batch_size = batch_of(loader)
    if batch_size is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    draw = random.Random(0)
    try:
        indices = [[draw.randrange(len(dataset)) for _ in range(batch_size)] for _ in range(_COLLATED)]
        batches = [loader.collate_fn([dataset[index] for index in some]) for some in indices]
    except Exception:
        # Whatever their data and collator may raise.
        return None
    return sample_lengths(dataset, batches, batch_size, "random")


def read_lengths(dataset: Any, indices: Iterable[int], most_seconds: float) -> dict[int, int]:
    """Return the number of tokens by sample index, as far as read in time; empty for samples without tokens.

    Padding is left out where there is a mask. An error of the data ends the reading.
    """
    columns = [name for name in (_IDS, _MASK) if name in (getattr(dataset, "column_names", None) or ())]
    is_stored = False
    if hasattr(dataset, "select_columns") and _IDS in columns:
        # Other columns may be images, slow to decode.
        dataset = dataset.select_columns(columns)
        # A transform (format "custom") may make other tokens of the stored columns.
        is_stored = getattr(dataset, "format", {}).get("type", "custom") != "custom"
    lengths = _stored_lengths(dataset, columns[-1], indices) if is_stored else _each_length(dataset, indices)
    ends_at, found = time.monotonic() + most_seconds, dict[int, int]()
    with contextlib.suppress(Exception):
        for index, tokens in lengths:
            found[index] = tokens
            if time.monotonic() > ends_at:
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
    """Yield index and tokens of each sample from blocks of a ``datasets.Dataset``'s ``column`` of ids or masks."""
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


def _pad_multiple(batches: Sequence[Mapping[str, Any]]) -> int:
    """Return the number to whose multiples the collator pads batches; 1 where it pads to the longest sample.

    This is the first of these numbers that explains all ``batches``: 1, the length of all batches if they have the
    same, powers of two from the largest down. 1 where none does.
    """
    pairs = [(int(batch[_IDS].shape[1]), max(_real_lengths(batch))) for batch in batches]
    padded_lengths = {padded for padded, _ in pairs}
    multiples = (1, *(padded_lengths if len(padded_lengths) == 1 else ()), *(1 << n for n in range(12, 0, -1)))
    fitting = (each for each in multiples if all(padded == -(-longest // each) * each for padded, longest in pairs))
    return next(fitting, 1)


# Samplers whose samples may be reordered. With others, consecutive samples may belong together.
_KNOWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN_NAMES = ("LengthGroupedSampler", "SeedableRandomSampler")


def can_spread(sampler: Any) -> bool:
    """Return whether the samples of a sampler may be reordered, as its type tells."""
    return type(sampler) in _KNOWN or type(sampler).__name__ in _KNOWN_NAMES


class SpreadSampler:
    """Yields the samples of another sampler step by step, so that any number of steps stands for the whole epoch.

    The first ``longest_steps`` steps have ``longest_per_batch`` of the ``longest`` samples in each micro-batch, so that
    they reach the peak of memory. A later step whose batches had new ``shapes`` is run again, until its shapes are
    known. A new iteration goes on where the last one stopped, also in the next epoch.
    """

    def __init__(
        self, sampler: Any, batch_size: int, step_samples: int, *, longest: Sequence[int] = (), longest_steps: int = 0,
        longest_per_batch: int = 1, shapes: BatchShapes | None = None,
    ) -> None:  # fmt: skip
        self._sampler = sampler
        self._batch_size = batch_size
        self._step_samples = step_samples
        self._longest = itertools.cycle(longest) if longest else None
        self._longest_steps, self._longest_per_batch = longest_steps, longest_per_batch
        # With 0 no shape counts as new, so that no step is run again.
        self._shapes = shapes or BatchShapes(settles=0)
        self._drawn_steps: deque[tuple[Sequence[int], int]] = deque()
        """Samples of each step whose end was not looked at yet, and how often the step may be run again."""
        self._seen_ends = len(self._shapes.ended)
        """Number of ended steps that were looked at."""
        self._endless_indices = self._spread_indices()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of an epoch: whole spread steps, then the rest in the sampler's own order."""
        # The rest is no whole step: taken from the spread order, it would shift all later steps.
        whole = len(self) // self._step_samples * self._step_samples
        yield from itertools.islice(self._endless_indices, whole)
        if whole < len(self):
            self._drawn_steps.append(((), 0))
            yield from itertools.islice(self._sampler, len(self) - whole)

    def _spread_indices(self) -> Iterator[int]:
        """Yield sample indices in the order that the class describes, until the sampler has none."""
        longest_steps = self._longest_steps if self._longest is not None else 0
        while indices := list(itertools.islice(self._sampler, MOST_SAMPLES)):
            size = self._step_samples
            steps = [indices[at : at + size] for at in range(0, len(indices) - size + 1, size)] or [indices]
            places = dict.fromkeys(itertools.islice(spread_positions(len(steps)), len(steps)))
            spread = [steps[place] for place in places]
            for step in itertools.islice(itertools.cycle(spread), longest_steps):
                assert self._longest is not None
                # Such a step is not run again, whatever its shapes are.
                self._drawn_steps.append(((), 0))
                for at, index in enumerate(step):
                    yield next(self._longest) if at % self._batch_size < self._longest_per_batch else index
            longest_steps = 0
            for step in spread:
                for repeated, repeats_left in self._with_new_shapes():
                    self._drawn_steps.append((repeated, repeats_left - 1))
                    yield from repeated
                self._drawn_steps.append((step, self._shapes.settles))
                yield from step

    def _with_new_shapes(self) -> Iterator[tuple[Sequence[int], int]]:
        """Yield the samples of ended steps that had new shapes, with how often each step may be run again.

        Loaders draw batches ahead of the training, so a step ends some steps after it was drawn.
        """
        while self._drawn_steps and self._seen_ends < len(self._shapes.ended):
            step, repeats_left = self._drawn_steps.popleft()
            self._seen_ends += 1
            if self._shapes.ended[self._seen_ends - 1] and repeats_left:
                yield step, repeats_left


def spread_loader(loader: Any, accumulation: int, **options: Any) -> None:
    """Make a loader draw samples spread over the epoch, where torch's own samplers and batches are used."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSampler and can_spread(batches.sampler):
        batch_size = batches.batch_size
        batches.sampler = SpreadSampler(batches.sampler, batch_size, batch_size * accumulation, **options)
