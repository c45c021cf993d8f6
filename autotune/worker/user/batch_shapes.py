"""Find the shapes of a training's largest batches, at any size, from its data and its collator."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autotune.worker.arrays import arrays_by_place, arrays_in

# How much of the data is looked at for its largest sample: about what a trial trains on.
_MOST_SAMPLES = 512
_MOST_STREAMED = 64
_MOST_SECONDS = 2.0
# Samples in the batch that shows whether batches are padded.
_MIXED = 8


class NotTraceableError(Exception):
    """The training is one that cannot be traced on fake tensors; the message says why."""


class BatchShapes:
    """The shapes of a batch of the largest sample that was seen, for any number of samples."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        samples = list(_samples(dataset))
        if not samples:
            raise NotTraceableError("its training data has no samples")
        largest = max(samples, key=_size)
        self._two, self._three = (collate([copy.deepcopy(largest) for _ in range(count)]) for count in (2, 3))
        mixed = [copy.deepcopy(sample) for sample in samples[:: max(1, len(samples) // _MIXED)]]
        self.is_padded = _has_padding(collate([*mixed, copy.deepcopy(largest)]))
        """Whether attention masks have zeros."""

    def at(self, size: int) -> Any:
        """Return a batch of so many samples; its values are zeros."""
        return _scaled(self._two, self._three, size)

    def dimensions(self) -> Iterator[int]:
        """Return the dimensions of one sample's tensors."""
        return (dimension for array in arrays_in(self.at(1)) for dimension in array.shape)


def of_loader(loader: Any) -> BatchShapes:
    """Return the shapes of the batches of a ``DataLoader``."""
    collate, dataset = getattr(loader, "collate_fn", None), getattr(loader, "dataset", None)
    if collate is None or dataset is None or getattr(loader, "batch_sampler", loader) is None:
        raise NotTraceableError("its batches are not made by a DataLoader from samples")
    return BatchShapes(collate, dataset)


def _samples(dataset: Any) -> Iterator[Any]:
    """Yield samples from all over the data, for a short time; the first ones of data that is streamed."""
    deadline = time.monotonic() + _MOST_SECONDS
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        step = max(1, len(dataset) // _MOST_SAMPLES)
        found: Iterator[Any] = (dataset[number] for number in range(0, len(dataset), step))
    else:
        found = itertools.islice(iter(dataset), _MOST_STREAMED)
    for sample in found:
        yield sample
        if time.monotonic() > deadline:
            return


def _size(value: Any) -> int:
    """Return about how large a sample is: its elements, words or pixels."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value)) if value and not isinstance(value[0], int | float) else len(value)
    if isinstance(value, str):
        return len(value)
    size = getattr(value, "size", 1)
    # Images of PIL have their width and height there, arrays of numpy the number of their elements.
    return size[0] * size[1] if isinstance(size, tuple) and len(size) == 2 else size if isinstance(size, int) else 1


def _scaled(two: Any, three: Any, size: int) -> Any:
    """Return a value of batches of any size, given those of a batch of two and one of three samples."""
    if isinstance(two, torch.Tensor):
        shape = [_scaled(a, b, size) for a, b in zip(two.shape, three.shape, strict=True)]
        return torch.zeros(shape, dtype=two.dtype)
    if isinstance(two, Mapping):
        return {name: _scaled(value, three[name], size) for name, value in two.items()}
    if isinstance(two, list | tuple):
        if len(two) != len(three):
            raise NotTraceableError("its batches are lists with an entry for each sample")
        return type(two)(_scaled(a, b, size) for a, b in zip(two, three, strict=True))
    if isinstance(two, int) and not isinstance(two, bool):
        return two + (three - two) * (size - 2)
    return two


def _has_padding(batch: Any) -> bool:
    return any("attention_mask" in place and bool((mask == 0).any()) for place, mask in arrays_by_place(batch))
