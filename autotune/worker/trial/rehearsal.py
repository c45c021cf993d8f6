"""Yield steps with new shapes twice from the user's data loader, so that their second run can be timed.

For a shape that it has not run yet, a GPU chooses, compiles and loads kernels. With cuDNN's attention on an H200 that
took 70 ms for each new padded length, and sometimes 1.7 s, where the step itself took 75 ms. With batches padded to
their longest sample, nearly all of the first steps have new lengths, and hardly any of a long training's steps do.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

from autotune.worker.arrays import arrays_by_place


class Rehearsing:
    """Decides which steps are yielded twice, and tells whether the current one is the first run of two.

    ``new_shapes`` counts the new shapes of the current step. It is 0 for a step to be timed: one with known shapes, or
    the second run. For each step that is yielded, one is fetched from the data loader, so that waiting for data takes
    as long as without rehearsals. Surplus steps are queued.
    """

    def __init__(self, micro_steps: int) -> None:
        self._micro_steps = micro_steps
        self._seen: set[Hashable] = set()
        self._taken: deque[list[Any]] = deque()
        self._owed: list[Any] = []
        """The step to repeat. Where the epoch ends first, it comes at the start of the next."""
        self.new_shapes = 0

    def over(self, loader: Any) -> Any:
        """Return a wrapper to use in place of a data loader."""
        return _Loader(self, loader)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a data loader, with steps of new shapes twice."""
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
                # A last step that is cut short by the end of the data is never timed.
                shapes = {_shapes(batch) for batch in step} - self._seen if len(step) == self._micro_steps else shapes
            self.new_shapes = len(shapes)
            yield from self._rehearsed(step, shapes) if shapes else step

    def _rehearsed(self, step: list[Any], shapes: set[Hashable]) -> Iterator[Any]:
        """Yield the batches of a step that is run for the first time."""
        # A copy, since training may remove entries from a batch.
        *others, last = (copy.copy(batch) for batch in step)
        yield from others
        # Recorded before the last batch is yielded: the caller may ask for no more after it.
        self._seen |= shapes
        self._owed = step
        yield last


class _Loader:
    """A data loader with other batches: everything else is that of the wrapped one."""

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
    """Return the shapes of a batch's tensors, and where each of them stands."""
    return tuple((place, tuple(array.shape)) for place, array in arrays_by_place(batch))
