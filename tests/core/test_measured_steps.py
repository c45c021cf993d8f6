"""Test when a trial has measured enough steps, and the step time estimated from them."""

import math
import random

import pytest

from autotune.core.measured_steps import is_enough, mean_step
from autotune.core.outcome import Effort

EFFORT = Effort()


FINAL = Effort(min_steps=20, max_steps=36, max_seconds=6.0)


def simulated(rng: random.Random, period: int, times: float, effort: Effort) -> list[float]:
    """Steps of 0.1 s, of which every ``period``-th takes ``times`` as long, until they are enough."""
    at, steps = rng.randrange(period), []
    while True:
        at += 1
        steps.append(0.1 * (times if at % period == 0 else 1) * rng.gauss(1, 0.004))
        width = mean_step(steps).relative_half_width() if len(steps) > 1 else math.inf
        if is_enough(steps, effort, width):
            return steps


@pytest.mark.parametrize(
    ("period", "times"),
    [(10, 2.0), (20, 4.0), *(pytest.param(*way, marks=pytest.mark.whole) for way in ((12, 3.0), (8, 1.6)))],
)
def test_a_step_that_is_slow_every_so_often_belongs_to_the_run(period: int, times: float) -> None:
    """The interval covers the mean of the whole run; where a slow step is not met, no trial is final."""
    rng, true = random.Random(period), 0.1 * (period - 1 + times) / period
    covered = seen = 0
    for _ in range(2000):
        steps = simulated(rng, period, times, FINAL)
        found = mean_step(steps)
        is_covered = abs(found.mean - true) <= found.half_width()
        assert is_covered or found.mean > 0.9 * true, "never so much too fast in silence"
        if sum(step > 0.15 for step in steps) >= 3:
            seen += 1
            covered += is_covered
    assert seen > 1900
    assert 0.93 <= covered / seen <= 0.97


def test_a_slow_step_is_waited_for_within_bounds() -> None:
    once = [0.1] * 5 + [0.3]
    assert not is_enough(once, EFFORT, 0.5)
    assert not is_enough([*once, *[0.1] * 20], EFFORT, 0.5)
    assert is_enough([*once, *[0.1] * 30], EFFORT, 0.5)
    assert is_enough([10 * each for each in once], EFFORT, 0.5), "its seconds are spent"
    assert is_enough([*once, *once], EFFORT, 0.001, are_alike=False)
    assert mean_step(once).mean == pytest.approx(0.8 / 6)
    assert mean_step(once).relative_half_width() > 0.5
    regular = 3 * ([0.1] * 5 + [0.3])
    assert mean_step(regular[2:]).mean == pytest.approx(0.8 / 6), "of whole periods"
    assert mean_step(regular[2:]).relative_half_width() < 0.01


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
