"""Find data loaders by the line of the user's code that makes them; change batch size and loading of some."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from autotune.worker.trial.training_watch import shapes_in
from autotune.worker.wrapping import after, around, module_of

# Modules that make loaders from other loaders. Their lines are skipped to find the user's line.
_LIBRARIES = (
    "torch.",
    "accelerate.",
    "lightning.",
    "pytorch_lightning.",
    "lightning_fabric.",
    "functools",
    "autotune.",
)
_KEY = "autotune_key"
MOST_PREFETCHED = 4
"""Batches that each loading process prepares ahead in a trial, at most. Steps on these are warm-up: with 256, which a
library sets, 196 steps came before the four that were timed. A choice."""


@dataclass(eq=False)
class LoaderOverlay:
    """Changes the one ``DataLoader`` with this ``key``, when the user's code creates it.

    A key is the line that creates a loader, and the loader's number among those created there.
    """

    key: str | None = None
    batch: int | None = None
    """``None`` leaves the script's own batch size."""
    workers: int = 0
    """0 leaves the script's own workers and prefetching."""
    prefetch: int | None = None
    _: KW_ONLY
    least_batches: int = 0
    """The fewest batches that the loader's length is to show: it is iterated again where its data ends earlier."""
    accumulation: int = 1
    on_made: Callable[[Any], None] = lambda _: None
    """Called with the loader once it is made."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Batch sizes of other loaders by key."""
    say: Callable[[str], None] = lambda _: None
    """Called with a message for each of the other loaders that is changed."""
    made: Any = field(default=None, init=False)
    """The loader with this ``key``; ``None`` before it is made."""
    own_batch_size: int | None = field(default=None, init=False)
    """The ``batch_size`` that the code gives the loader, 1 without one; ``None`` before it is made."""
    _made_at: Counter[str] = field(default_factory=Counter, init=False)
    """Number of loaders created at each line."""

    def install(self) -> None:
        """Wrap ``DataLoader`` for the rest of this process, to give each loader its key and change some."""
        signature = inspect.signature(DataLoader.__init__)

        def make_changed(make: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
            """Create a loader, with the changes that are asked for its key, and record the key in it."""
            place = line_of_maker()
            key = f"{place}#{self._made_at[place]}"
            self._made_at[place] += 1
            is_searched, batch = key == self.key, self.batch if key == self.key else self.others.get(key)
            given = signature.bind(loader, *args, **kwargs)
            if is_searched:
                self.made, self.own_batch_size = loader, given.arguments.get("batch_size", 1)
                if self.workers:
                    given.arguments |= {"num_workers": self.workers, "prefetch_factor": self.prefetch}
            if batch is not None:
                if (sampler := copy.copy(given.arguments.get("batch_sampler"))) is None:
                    given.arguments["batch_size"] = batch
                else:
                    sampler.batch_size = batch
                    given.arguments["batch_sampler"] = sampler
            make(*given.args, **given.kwargs)
            if is_searched:
                self.on_made(loader)
            elif batch is not None:
                self.say(f"batch_size={batch} is set for the DataLoader at {os.path.basename(place)}")
            setattr(loader, _KEY, key)

        around(DataLoader, "__init__", make_changed)
        if self.key is not None and self.least_batches:
            around(DataLoader, "__len__", self._lengthened)

    def _lengthened(self, length: Callable[..., int], loader: Any) -> int:
        """Return a loader's length; for the training loader a multiple of it, if it has fewer than ``least_batches``.

        The factor is 1 more than a multiple of the accumulation: as many batches as before are left after whole steps.
        """
        own = length(loader)
        if key_of(loader) != self.key or not 0 < own < self.least_batches:
            return own
        rounds = -(-self.least_batches // own)
        return own * (1 + -(-rounds // self.accumulation) * self.accumulation)


def cap_prefetching() -> None:
    """Limit prefetching of every ``DataLoader`` worker in this process to ``MOST_PREFETCHED`` batches."""

    def cap(_: None, loader: Any, *__: Any, **___: Any) -> None:
        if (loader.prefetch_factor or 0) > MOST_PREFETCHED:
            loader.prefetch_factor = MOST_PREFETCHED

    after(DataLoader, "__init__", cap)


def key_of(loader: Any) -> str | None:
    """Return where a loader was created, ``/home/me/train.py:12#0``; ``None`` for objects without a key."""
    return getattr(loader, _KEY, None)


def copy_key(new_loader: Any, original: Any) -> None:
    """Copy the key of the user's loader to a loader that a library made from it."""
    key = key_of(original)
    if key is not None:
        setattr(new_loader, _KEY, key)


def batch_of(loader: Any) -> int | None:
    """Return a loader's batch size; ``None`` where it is unknown or the dataset makes the batches."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None) if sampler is not None else getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def is_made_by_data(loader: Any) -> bool:
    """Return whether the dataset itself yields batches, so that the loader's batch size has no effect.

    Only loaders with a batch size of 1 are examined: such a collator returns the same shapes for one item and for two.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if batch_of(loader) != 1 or not hasattr(dataset, "__getitem__"):
        return False
    try:
        one, two = (shapes_in((loader.collate_fn([dataset[0] for _ in range(count)]),)) for count in (1, 2))
    except Exception:
        # The user's data and collator may raise any error.
        return False
    return bool(one) and one == two


def line_of_maker() -> str:
    """Return file and line of the user's code that called the caller of this function, perhaps through libraries."""
    frame = sys._getframe(2)
    while frame.f_back is not None and module_of(frame).startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"
