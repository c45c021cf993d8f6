"""Test what is computed of batches from the lengths of samples: shapes, tokens, padding, the multiple to round to."""

import itertools
import math
import random

import pytest

from autotune.core.lengths import Batching, SampleLengths, choose_multiple, new_in_steps, shapes_of

DRAW = random.Random(0)
TEXTS = SampleLengths.of(min(512, max(8, int(DRAW.lognormvariate(math.log(135), 0.7)))) for _ in range(8192))


def test_the_mean_and_the_shapes_are_those_of_an_order_drawn_at_random() -> None:
    lengths = SampleLengths.of([4, 4, 4, 10])
    found = shapes_of(lengths, Batching(2), steps=5000)
    # Of six pairs three have the longest.
    assert found.mean_tokens == pytest.approx(2 * (4 + 10) / 2, rel=0.02)
    assert (found.new, found.longest_tokens) == (2, 20)
    assert found.padding == pytest.approx(1 - 11 / 14, abs=0.02)
    assert shapes_of(lengths, Batching(2), steps=1).new == 1
    assert shapes_of(lengths, Batching(2, accumulation=2)).steps == 1, "an epoch"


def test_padding_to_a_multiple_makes_few_shapes_and_little_more_tokens() -> None:
    plain = shapes_of(TEXTS, Batching(32), steps=1000)
    rounded = shapes_of(TEXTS, Batching(32, multiple=64), steps=1000)
    assert plain.new > 100
    assert rounded.new <= 5
    assert 1 < rounded.mean_tokens / plain.mean_tokens < 1.06
    assert shapes_of(TEXTS, Batching(32, padding="max_length")).new == 1


def test_rows_have_no_padding_but_what_fills_them() -> None:
    assert shapes_of(TEXTS, Batching(32, padding="rows")).padding == pytest.approx(0)
    filled = shapes_of(TEXTS, Batching(32, padding="rows", multiple=1024))
    assert filled.new <= 6
    assert 0 < filled.padding < 0.1
    assert all(tokens % 1024 == 0 for tokens in filled.seen)


def test_a_row_with_so_many_long_samples_is_as_long_as_the_longest_of_a_run() -> None:
    longest = shapes_of(TEXTS, Batching(8, padding="rows"), steps=5000).longest_tokens
    many = TEXTS.long_in_row(8, longest)
    usual = sum(tokens * count for tokens, count in TEXTS.counts) / 8192
    assert 1 < many < 8
    assert 0 <= longest - many * 512 - (8 - many) * usual < 512
    assert TEXTS.long_in_row(8, 8 * 512) == 8
    assert TEXTS.long_in_row(8, 600) == 1
    assert SampleLengths.of([512] * 9).long_in_row(8, 8 * 512) == 1, "one length"


def test_batches_of_like_lengths_are_hardly_padded() -> None:
    by_chance, grouped, balanced = (
        shapes_of(TEXTS, Batching(8, 4, order=order)) for order in ("random", "group_by_length", "batch_rebalance")
    )
    assert grouped.padding < 0.1 < balanced.padding < by_chance.padding


def test_a_rank_meets_its_own_shapes_and_the_others_wait() -> None:
    import numpy as np

    assert new_in_steps(np.array([[1, 2], [1, 2], [2, 2], [1, 1]]), 1, 50) == ((10, 3), (30, 3), (50, 3))
    assert new_in_steps(np.array([[1, 2], [1, 2], [2, 2], [1, 1]]), 2, 1) == ((1, 1),)
    assert shapes_of(TEXTS, Batching(8, ranks=4), steps=200).new > shapes_of(TEXTS, Batching(8), steps=200).new


def test_the_multiple_costs_least_in_tokens_and_shapes() -> None:
    batching, token_seconds = Batching(32), 5e-6

    def seconds(multiple: int | None, shape_seconds: float) -> float:
        found = shapes_of(TEXTS, Batching(32, multiple=multiple or 1), 1000)
        return 1000 * found.mean_tokens * token_seconds + found.new * shape_seconds

    for shape_seconds in (0.0, 0.2, 5.0):
        best = choose_multiple(TEXTS, batching, token_seconds, steps=1000, shape_seconds=shape_seconds)
        powers = [None, *(2**n for n in range(3, 10))]
        assert seconds(best, shape_seconds) == min(seconds(multiple, shape_seconds) for multiple in powers)
    assert choose_multiple(TEXTS, batching, token_seconds, shape_seconds=0.0) is None
    alike = SampleLengths.of([512] * 9)
    assert choose_multiple(alike, batching, token_seconds, shape_seconds=0.2) is None, "one length"


def test_what_is_recorded_of_very_long_texts_is_bounded() -> None:
    lengths = SampleLengths.of(itertools.chain(range(1, 40_000)))
    assert len(lengths.counts) <= 1024
    assert sum(count for _, count in lengths.counts) == 39_999
    assert lengths.longest >= 39_999


def test_unknown_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="not known"):
        shapes_of(SampleLengths(unknown="a stream"), Batching(8))
