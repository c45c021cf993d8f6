"""Give a trial steps that are spread over an epoch of the user's own sampler: its first steps may be the longest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from autotune.core.lengths import MOST_SAMPLES
from autotune.worker.dataset.schedule import GROUP, spread_positions

# Of others, the samples that come one after the other may belong together.
_KNOWN = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN_NAMES = ("LengthGroupedSampler", "SeedableRandomSampler")


def can_spread(sampler: Any) -> bool:
    """Return whether the samples of a sampler may be trained with in another order."""
    return type(sampler) in _KNOWN or type(sampler).__name__ in _KNOWN_NAMES


class SpreadSampler:
    """Yields the samples of another sampler, step by step in an order that stands for an epoch at any time.

    The first ``longest_steps`` steps have one of the ``longest`` samples in each micro-batch, so that the peak of
    memory is met. Then groups of steps follow, each ``visits`` times, so that all shapes of the last time are known. It
    goes on where it was left, also in the next epoch.
    """

    def __init__(
        self, sampler: Any, batch: int, step_samples: int, *, longest: Sequence[int] = (), longest_steps: int = 0,
        visits: int = 1,
    ) -> None:  # fmt: skip
        self._sampler = sampler
        self._batch = batch
        self._step_samples = step_samples
        self._longest = itertools.cycle(longest) if longest else None
        self._longest_steps = longest_steps
        self._visits = visits
        self._endless = self._samples()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        # What is left of an epoch after its whole steps would put all later steps between two of the order.
        whole = len(self) // self._step_samples * self._step_samples
        yield from itertools.islice(self._endless, whole)
        yield from itertools.islice(self._sampler, len(self) - whole)

    def _samples(self) -> Iterator[int]:
        left = self._longest_steps if self._longest is not None else 0
        while indices := list(itertools.islice(self._sampler, MOST_SAMPLES)):
            size = self._step_samples
            steps = [indices[at : at + size] for at in range(0, len(indices) - size + 1, size)] or [indices]
            places = dict.fromkeys(itertools.islice(spread_positions(len(steps)), len(steps)))
            spread = [steps[place] for place in places]
            for step in itertools.islice(itertools.cycle(spread), left):
                assert self._longest is not None
                # The others are padded to its length.
                yield from (next(self._longest) if at % self._batch == 0 else one for at, one in enumerate(step))
            left = 0
            for at in range(0, len(spread), GROUP):
                for step in spread[at : at + GROUP] * self._visits:
                    yield from step


def spread_loader(loader: Any, accumulation: int, **options: Any) -> None:
    """Have the batches of a loader drawn so, unless its data or a batch sampler of the user's own decides them."""
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSampler and can_spread(batches.sampler):
        batch = batches.batch_size
        batches.sampler = SpreadSampler(batches.sampler, batch, batch * accumulation, **options)
