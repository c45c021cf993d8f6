"""Test scales, ticks and labels of charts."""

import pytest

from autotune.results.html.axes import Box, Scale, place_label, shortened


@pytest.mark.parametrize(
    ("scale", "most", "ticks"),
    [
        (Scale(0, 24.4, 0, 1), 6, [0, 5, 10, 15, 20]),
        (Scale(0, 1, 0, 1), 6, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(200, 1700, 0, 1, is_log=True), 8, [200, 300, 500, 700, 1000, 1500]),
        (Scale(1, 1000, 0, 1, is_log=True), 4, [1, 10, 100, 1000]),
        (Scale(21, 44, 0, 1, is_log=True), 5, [25, 30, 35, 40]),
    ],
)
def test_ticks_are_round(scale: Scale, most: int, ticks: list[float]) -> None:
    assert scale.ticks(most) == pytest.approx(ticks)


def test_a_logarithmic_scale_has_equal_ratios_equally_far_apart() -> None:
    scale = Scale(1, 100, 10, 210, is_log=True)
    assert [scale(1), scale(10), scale(100)] == pytest.approx([10, 110, 210])
    assert scale(1e9) == 210


def test_a_label_avoids_what_is_taken_and_stays_inside() -> None:
    area = Box(0, 0, 400, 400)
    free = place_label("best 32 × 2", 200, 200, area, [], [])
    assert free.bottom < 200
    again = place_label("best 32 × 2", 200, 200, area, [free], [])
    assert not again.overlaps(free)
    assert place_label("best 32 × 2", 398, 2, area, [], []).is_within(area)


def test_long_texts_are_cut() -> None:
    assert shortened("bf16", 100) == "bf16"
    assert shortened("bf16, checkpointing, eager, adafactor", 100) == "bf16, checkpoi…"
