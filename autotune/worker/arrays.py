"""Find the tensors in a batch, or in what a model is called with and returns, however it is nested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def parts_by_place(value: Any, place: str = "", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every array, list and tuple in a nested value, outermost first: ``0``, ``1.input_ids``.

    Lists are yielded, too, since detectors get their samples in one. ``depth`` limits the levels of nesting.
    """
    if has_shape(value):
        yield place, value
    elif depth:
        if is_row(value):
            yield place, value
        for key, part in _parts(value):
            yield from parts_by_place(part, f"{place}.{key}" if place else str(key), depth - 1)


def arrays_by_place(value: Any, place: str = "", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yield the path and the array of every array in a nested value."""
    return ((at, part) for at, part in parts_by_place(value, place, depth) if has_shape(part))


def arrays_in(value: Any) -> Iterator[Any]:
    """Yield every array in a nested value."""
    return (array for _, array in arrays_by_place(value))


def has_shape(value: Any) -> bool:
    """Return whether a value is an array, whose ``shape`` is a tuple. A batch with a key ``shape`` is none."""
    try:
        return isinstance(getattr(value, "shape", None), tuple)
    except Exception:
        # A dictionary whose attributes are its keys may raise KeyError, and a nested tensor has no shape.
        return False


def is_row(value: Any) -> bool:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, list | tuple)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a container with their keys or indices; none for any other value."""
    if hasattr(value, "items"):
        return value.items()  # type: ignore[no-any-return]
    return enumerate(value) if is_row(value) else ()


def cut(value: Any, rows: int, start: int, end: int) -> Any:
    """Return the samples from ``start`` to ``end`` of a nested batch of ``rows`` samples, a batch of the same form.

    ``None`` where no array has so many rows, or the batch cannot be cut.
    """
    found = False

    def part(each: Any) -> Any:
        """Return the rows of an array, or of a list with an item for each sample; containers are cut inside."""
        nonlocal found
        if has_shape(each):
            if len(each.shape) and each.shape[0] == rows:
                found = True
                return each[start:end]
            return each
        if isinstance(each, Mapping) or hasattr(each, "items"):
            return type(each)({name: part(inner) for name, inner in each.items()})
        if is_row(each) and any(has_shape(inner) or isinstance(inner, Mapping) for inner in each):
            return type(each)(part(inner) for inner in each) if type(each) in (list, tuple) else each
        return each[start:end] if is_row(each) and len(each) == rows else each

    try:
        smaller = part(value)
    except Exception:
        # A class of the user's may raise anything.
        return None
    return smaller if found else None
