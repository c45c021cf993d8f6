"""Test when a trial has measured enough steps, and the step time estimated from them."""

import math
import random

import pytest

from autotune.core.measured_steps import is_enough, mean_step, without_delay
from autotune.core.outcome import Effort

EFFORT = Effort()


def test_one_delayed_step_of_five_is_left_out_and_two_are_not() -> None:
    assert without_delay([1.0, 1.1, 9.0, 1.0, 1.1]) == [1.0, 1.1, 1.0, 1.1]
    assert without_delay([1.0, 1.1, 9.0, 8.0, 1.1]) == [1.0, 1.1, 9.0, 8.0, 1.1]
    assert without_delay([1.0, 9.0]) == [1.0, 9.0]


@pytest.mark.parametrize("deviation", [0.005, 0.01, 0.02, 0.05])
def test_stopping_at_the_first_narrow_interval_still_covers_the_mean(deviation: float) -> None:
    rng = random.Random(int(deviation * 1000))
    hits = 0
    for _ in range(1500):
        steps: list[float] = []
        while True:
            steps.append(rng.gauss(0.1, 0.1 * deviation))
            found = mean_step(steps)
            if is_enough(steps, EFFORT, found.relative_half_width() if len(steps) > 1 else math.inf):
                break
        hits += abs(found.mean - 0.1) <= found.half_width()
    assert hits / 1500 >= 0.915


def test_steps_are_measured_for_a_least_time_within_their_most() -> None:
    effort = Effort(min_seconds=1.5, max_steps=24, max_seconds=4.0)
    assert not is_enough([0.1] * 14, effort, 0.0)
    assert is_enough([0.1] * 15, effort, 0.0)
    assert is_enough([0.01] * 24, effort, 0.0)
