"""Test when a promised speed is kept, missed, or cannot be told."""

import math
import random

import pytest

from autotune.verify.comparison import Interval, Verdict, compare, describe_speed, mean_speed, slack


def around(mean: float, share: float) -> Interval:
    return Interval(mean, mean * (1 - share), mean * (1 + share))


@pytest.mark.parametrize(
    ("promised", "obtained", "verdict"),
    [
        pytest.param(around(100, 0.02), around(99, 0.005), "kept", id="within"),
        pytest.param(around(100, 0.02), around(150, 0.005), "faster", id="above"),
        pytest.param(around(100, 0.02), around(103, 0.02), "faster", id="above, but reaching into it"),
        pytest.param(around(100, 0.02), around(105, 0.30), "cannot_tell", id="above, in a run that shows little"),
        pytest.param(around(100, 0.02), around(98.5, 0.01), "kept", id="its speed within, its interval not quite"),
        pytest.param(around(100, 0.02), around(97, 0.005), "missed", id="wholly below"),
        pytest.param(around(100, 0.02), around(97, 0.02), "cannot_tell", id="below, but reaching into it"),
        pytest.param(around(100, 0.40), around(85, 0.01), "cannot_tell", id="a promise that promises little"),
        pytest.param(around(100, 0.40), around(55, 0.01), "missed", id="less than a promise of little"),
        pytest.param(around(100, 0.40), around(105, 0.01), "kept", id="surely as fast as the promised speed"),
        pytest.param(around(100, 0.02), around(101, 0.40), "cannot_tell", id="a run that shows little"),
        pytest.param(around(100, 0.02), Interval(100, 0, math.inf), "cannot_tell", id="a single stretch"),
    ],
)
def test_two_intervals_are_compared(promised: Interval, obtained: Interval, verdict: Verdict) -> None:
    assert compare(promised, obtained) == verdict
    assert compare(promised.scaled(3), obtained.scaled(3)) == verdict


def test_the_slack_is_the_slowest_speed_that_is_not_missed() -> None:
    promised, noise = around(100, 0.05), 0.03
    slowest = 100 * (1 - slack(promised, around(100, noise)))
    assert compare(promised, around(slowest * 1.001, noise)) != "missed"
    assert compare(promised, around(slowest * 0.999, noise)) == "missed"


def test_few_stretches_have_the_interval_of_few_values() -> None:
    """Student's t of two degrees of freedom is 4.30, not 1.96."""
    interval = mean_speed(100.0, [99.0, 100.0, 101.0])
    assert interval.relative_half_width == pytest.approx(4.303 / math.sqrt(3) / 100, rel=1e-3)
    assert mean_speed(100.0, [100.0]).high == math.inf
    assert mean_speed(100.0, [100.0]).low == 0.0


def test_the_interval_covers_the_mean_of_a_drifting_run() -> None:
    """Steps that are slow together, in stretches of ten: nine of ten intervals or more hold the true speed."""
    generator = random.Random(1)
    covered = 0
    for _ in range(400):
        seconds, state = [], 0.0
        for _ in range(100):
            state = 0.7 * state + generator.gauss(0, 0.02)
            seconds.append(1 + state)
        stretches = [10 / sum(seconds[start : start + 10]) for start in range(0, 100, 10)]
        interval = mean_speed(100 / sum(seconds), stretches)
        covered += interval.low <= 1.0 <= interval.high
    assert covered / 400 > 0.9


def test_a_promise_that_holds_is_hardly_ever_missed() -> None:
    """The next run of a host-bound configuration: processes differ by 7 %, the promise says so."""
    generator = random.Random(2)
    missed = 0
    for _ in range(1000):
        promised = around(100, 2.13 * 0.07)
        run = 100 * math.exp(generator.gauss(0, 0.07))
        missed += compare(promised, around(run, 0.01)) == "missed"
    assert missed / 1000 < 0.04


# A stock run of BERT-large on two H200, 22 November 2026: samples/s of stretches of three steps. In the seventh, one
# rank waited 3.2 s for the other, which wrote the checkpoint.
STALLED = [530.75, 525.22, 530.74, 519.33, 539.92, 551.23, 54.22, 546.39, 546.47, 550.24, 542.13, 552.07]


def run_of(speeds: list[float]) -> Interval:
    return mean_speed(len(speeds) / sum(1 / speed for speed in speeds), speeds)


def test_one_stall_refutes_nothing_and_a_real_shortfall_beside_it_is_missed() -> None:
    promised = Interval(561.05, 546.30, 576.20)
    stalled = run_of(STALLED)
    assert stalled.mean < 320
    assert compare(promised, stalled) == "cannot_tell"
    assert compare(promised, run_of([0.95 * speed for speed in STALLED])) == "missed"
    assert compare(promised, run_of([0.95 * speed for speed in STALLED if speed > 100])) == "missed"
    assert compare(Interval(540, 525, 555), run_of([speed for speed in STALLED if speed > 100])) == "kept"


def test_several_stalls_are_part_of_the_speed() -> None:
    """Every other stretch takes twice as long: the run is slower, whatever the reason."""
    assert compare(around(100, 0.02), run_of([100.0, 50.0] * 6)) == "missed"


def test_an_interval_with_unequal_sides_is_shown_with_both_ends() -> None:
    assert describe_speed(around(320, 0.012)) == "320.0 ± 1.2%"
    assert describe_speed(run_of(STALLED)) == "309.0 (159.2 to 555.8)"
    assert describe_speed(Interval(320, 0.0, math.inf)) == "320.0 (0.00 or more)"
