"""A data loader of the user's whose steps come twice where their shapes are new, so that the second time can be timed.

For a shape that it has not seen yet a GPU chooses, builds and loads kernels: with cuDNN's attention 70 ms for each
padded length was seen on an H200, now and then 1.7 s, where the step itself took 75 ms. Padded to the longest of each
batch, nearly all of the first steps are such steps, and hardly any of a long training's.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any


class Rehearsing:
    """Which steps come twice, and whether the one under way is the first of two.

    ``new_shapes`` counts the new ones of the step whose batches were given last; 0 says that it is to be timed: none is
    new, or it came just before. For each step that is given one is taken from the data loader, so that waiting for data
    takes as long as ever; those that were taken too early come later.
    """

    def __init__(self, micro_steps: int) -> None:
        self._micro_steps = micro_steps
        self._seen: set[Hashable] = set()
        self._taken: deque[list[Any]] = deque()
        self._owed: list[Any] = []
        """The step that was rehearsed last, until it comes again: in the next epoch, if this one ends before."""
        self.new_shapes = 0

    def over(self, loader: Any) -> Any:
        """What stands in for a data loader."""
        return _Loader(self, loader)

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of a data loader, those of some steps twice."""
        batches = iter(loader)
        while True:
            if taken := list(itertools.islice(batches, self._micro_steps)):
                self._taken.append(taken)
            step, self._owed = self._owed, []
            shapes: set[Hashable] = set()
            if not step:
                if not self._taken:
                    return
                step = self._taken.popleft()
                # What is cut short at the end of the data is not timed in any case.
                shapes = {_shapes(batch) for batch in step} - self._seen if len(step) == self._micro_steps else shapes
            self.new_shapes = len(shapes)
            yield from self._rehearsed(step, shapes) if shapes else step

    def _rehearsed(self, step: list[Any], shapes: set[Hashable]) -> Iterator[Any]:
        """The batches of a step that comes for the first time."""
        # What trains on a batch may take things out of it.
        *others, last = (copy.copy(batch) for batch in step)
        yield from others
        # Nobody may ask for more once this one is given.
        self._seen |= shapes
        self._owed = step
        yield last


class _Loader:
    """A data loader in all but what iterating over it gives."""

    def __init__(self, rehearsing: Rehearsing, loader: Any) -> None:
        self._rehearsing = rehearsing
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._rehearsing.batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _shapes(batch: Any) -> Hashable:
    """The shapes of a batch's tensors, as they lie in it."""
    if hasattr(batch, "shape"):
        return tuple(batch.shape)
    if hasattr(batch, "items"):
        return tuple((name, _shapes(value)) for name, value in batch.items())
    if isinstance(batch, list | tuple):
        return tuple(_shapes(value) for value in batch)
    return None
