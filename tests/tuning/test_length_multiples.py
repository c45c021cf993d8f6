"""Multiples of lengths and rows: few enough that each can be compiled and captured, also in a long run."""

import pytest

from autotune.core.lengths import Batching, SampleLengths, shapes_of
from autotune.tuning.prepare import _few


@pytest.mark.parametrize("padding", ["longest", "rows"])
def test_there_are_few_shapes_however_long_a_run_is(padding: str) -> None:
    lengths = SampleLengths.of([8 + 61 * at % 1000 for at in range(2000)], samples=400_000)
    how = Batching(16, padding=padding)  # type: ignore[arg-type]
    multiple = _few(lengths, how, 8)
    counts = [
        len(shapes_of(lengths, Batching(16, padding=padding, multiple=n)).seen) for n in (multiple, multiple // 2)
    ]  # type: ignore[arg-type]
    assert counts[0] <= 16 < counts[1]
