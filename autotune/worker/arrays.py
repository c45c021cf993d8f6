"""Find the tensors in a batch, or in what a model is called with and returns, however it is nested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def arrays_by_place(value: Any, place: str = "", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yield whatever has a shape in a value, with where it stands: ``0``, ``1.input_ids``."""
    if has_shape(value):
        yield place, value
    elif depth:
        for at, part in _parts(value):
            yield from arrays_by_place(part, f"{place}.{at}" if place else str(at), depth - 1)


def lengths_by_place(value: Any, place: str = "", depth: int = 8) -> Iterator[tuple[str, int]]:
    """Yield how many values each row in a value has, with where it stands: detectors get a list of samples."""
    if has_shape(value) or not depth:
        return
    if is_row(value):
        yield place, len(value)
    for at, part in _parts(value):
        yield from lengths_by_place(part, f"{place}.{at}" if place else str(at), depth - 1)


def arrays_in(value: Any) -> Iterator[Any]:
    """Yield whatever has a shape in a value."""
    return (array for _, array in arrays_by_place(value))


def has_shape(value: Any) -> bool:
    """Return whether a value is an array; a batch that gives its keys as attributes may have one of this name."""
    try:
        return isinstance(getattr(value, "shape", None), tuple)
    except Exception:
        # A dictionary whose attributes are its keys may raise KeyError, and a nested tensor has no shape.
        return False


def is_row(value: Any) -> bool:
    """Return whether a value holds others in a row."""
    return isinstance(value, list | tuple)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a value holds, each with its key or index."""
    if hasattr(value, "items"):
        return value.items()  # type: ignore[no-any-return]
    return enumerate(value) if is_row(value) else ()
