"""Test intervals: against scipy where it is installed, and by their coverage in simulations."""

import math
import random
import statistics

import pytest

from autotune.core import statistics as st


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4.5, 2.6591), (10, 2.2281), (math.inf, 1.95996)]
)
def test_quantiles_are_those_of_published_tables(degrees: float, expected: float) -> None:
    assert st.quantile(degrees) == pytest.approx(expected, abs=2e-4)


def test_tails_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2.5, 7, 40):
        for t in (-3.0, -0.5, 0.0, 0.7, 2.0, 9.0):
            assert st.upper_tail(t, degrees) == pytest.approx(stats.t.sf(t, degrees), abs=1e-10)


def test_the_mean_of_few_values_is_uncertain_by_students_t() -> None:
    found = st.estimate_mean([1.0, 1.1, 1.2], relative_prior=None)
    assert found.mean == pytest.approx(1.1)
    assert found.half_width() == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)


def test_one_value_alone_has_no_known_error() -> None:
    assert st.estimate_mean([1.0], relative_prior=None).half_width() == math.inf


def test_values_that_happen_to_agree_are_not_certain() -> None:
    assert st.estimate_mean([1.0, 1.0, 1.0]).relative_half_width() > 0.003


def covered(rng: random.Random, count: int, make: object, trials: int = 2000) -> float:
    hits = 0
    for _ in range(trials):
        found = st.estimate_mean(make(rng, count), relative_prior=None)  # type: ignore[operator]
        hits += abs(found.mean - 1.0) <= found.half_width()
    return hits / trials


def white(rng: random.Random, count: int) -> list[float]:
    return [1 + rng.gauss(0, 0.03) for _ in range(count)]


def correlated(rng: random.Random, count: int) -> list[float]:
    values, level = [], rng.gauss(0, 0.03)
    for _ in range(count):
        level = 0.5 * level + rng.gauss(0, 0.03 * math.sqrt(0.75))
        values.append(1 + level)
    return values


@pytest.mark.parametrize("count", [3, 5, 12])
def test_intervals_of_independent_steps_cover_95_percent(count: int) -> None:
    assert 0.93 <= covered(random.Random(count), count, white) <= 0.98


def test_correlation_that_shows_widens_the_interval() -> None:
    many = covered(random.Random(1), 40, correlated)
    assert many > 0.90, "the mean of 40 correlated steps was taken for that of 40 independent ones"


def test_the_next_of_two_processes_is_far_less_certain_than_their_mean() -> None:
    between = st.Variance(0.0, 0.0).updated(st.squares_about_mean([0.0, 0.02])[1], 1)
    found = st.next_value([0.0, 0.02], between)
    assert found.mean == pytest.approx(0.01)
    assert found.half_width() == pytest.approx(12.7062 * math.sqrt(0.0002) * math.sqrt(1.5), rel=1e-3)


def test_a_prior_counts_for_as_many_values_as_it_says() -> None:
    found = st.Variance(0.01, 4.0).updated(4 * 0.03**2, 4.0)
    assert found.degrees == 8
    assert found.deviation == pytest.approx(math.sqrt((0.01**2 + 0.03**2) / 2))


def test_a_difference_is_as_uncertain_as_both_together() -> None:
    found = st.difference(st.Estimate(3.0, 0.3, 5.0), st.Estimate(2.0, 0.4, 5.0))
    assert found.mean == pytest.approx(1.0)
    assert found.error == pytest.approx(0.5)
    assert 5 < found.degrees < 10


def test_what_is_expected_beyond_a_threshold_is_the_mean_of_what_is_above_it() -> None:
    rng = random.Random(3)
    for mean, error in ((0.0, 1.0), (-2.0, 1.0), (1.0, 0.5)):
        drawn = statistics.fmean([max(0.0, rng.gauss(mean, error)) for _ in range(200_000)])
        assert st.expected_excess(st.Estimate(mean, error, math.inf)) == pytest.approx(drawn, abs=0.01)
    assert st.expected_excess(st.Estimate(3.0, 0.0, 1.0), 1.0) == 2.0
