"""Compute every interval of this package: of a mean, of the next run, and of a difference between two means.

All of them rest on Student's t, since measurements are few. The variance of so few values is itself uncertain, so it is
combined with a prior: a deviation that is usual for such values, worth a stated number of degrees of freedom (the
conjugate prior of a normal variance; Gelman et al., Bayesian Data Analysis, section 3.3). With many values the prior
no longer counts.

Standard library only: the parent process and the trial processes both import this module.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
"""The coverage of every interval that is shown."""


@dataclass(frozen=True)
class Variance:
    """An estimate of a variance: of measured values, or a prior (what is usual before anything is measured)."""

    deviation: float
    """Its square root, in the unit of the values; relative where the values are logarithms."""
    degrees: float
    """Degrees of freedom: the number of measured deviations from a mean that it is worth."""

    def updated(self, sum_of_squares: float, degrees: float) -> Variance:
        """Return this variance combined with ``degrees`` new deviations, whose squares add up to ``sum_of_squares``."""
        total = self.degrees + degrees
        if total <= 0:
            return self
        return Variance(math.sqrt((self.degrees * self.deviation**2 + sum_of_squares) / total), total)


STEP_VARIANCE = Variance(0.01, 1.0)
"""The relative deviation between the steps of one process, before any was measured.

Between the 0.1 to 1 % of steps that the GPU limits and the 2 to 5 % of those that wait for the host (H200). It keeps a
few steps that happen to agree from looking certain: with it, stopping at the first interval below 1 % covers the mean
in 93 to 99 % of simulated cases; without it in 75 to 89 %."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    error: float
    """Standard error of the mean, in the unit of the mean."""
    degrees: float
    """Degrees of freedom of the error."""

    def half_width(self, confidence: float = CONFIDENCE) -> float:
        """Return half the width of the mean's confidence interval; infinite where no variance is known."""
        if self.degrees <= 0 or not math.isfinite(self.error):
            return math.inf
        return quantile(self.degrees, confidence) * self.error

    def relative_half_width(self, confidence: float = CONFIDENCE) -> float:
        """Return half the width of the mean's confidence interval, as a share of the mean; infinite for a mean of 0."""
        return self.half_width(confidence) / abs(self.mean) if self.mean else math.inf


def squares_about_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the values and the sum of the squares of their deviations from it."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values)


def estimate_mean(values: Sequence[float], relative_prior: Variance | None = STEP_VARIANCE) -> Estimate:
    """Estimate the mean of a series from some of its values, such as the seconds of a few steps.

    ``relative_prior`` is the usual variance of such values, relative to the mean; ``None`` uses the values alone. A
    positive correlation between neighbouring values widens the interval.
    """
    mean, squares = squares_about_mean(values)
    count = len(values)
    prior = Variance(0.0, 0.0)
    if relative_prior is not None:
        prior = Variance(relative_prior.deviation * abs(mean), relative_prior.degrees)
    variance = prior.updated(squares, count - 1)
    if variance.degrees <= 0:
        return Estimate(mean, math.inf, 0.0)
    independent_count = count / _inflation(values, mean, squares)
    return Estimate(mean, variance.deviation / math.sqrt(independent_count), variance.degrees)


# Fewer values than this say too little of their correlation.
_FEWEST_FOR_CORRELATION = 6
# Of an autoregressive series the variance of the mean is (1 + r) / (1 - r) times that of independent values.
_MOST_CORRELATION = 0.8


def _inflation(values: Sequence[float], mean: float, squares: float) -> float:
    """Return how many times larger correlation makes the variance of the mean, from the values' autocorrelation.

    ``squares`` is the sum of the squares of the deviations from ``mean``.
    """
    if len(values) < _FEWEST_FOR_CORRELATION or squares <= 0:
        return 1.0
    pairs = itertools.pairwise(values)
    # Of n independent values this is -1 / n on average (Kendall, Biometrika 41, 1954), which is added back below.
    raw = math.fsum((a - mean) * (b - mean) for a, b in pairs) / squares
    correlation = min(_MOST_CORRELATION, raw + 1 / len(values))
    return (1 + correlation) / (1 - correlation) if correlation > 0 else 1.0


def next_value(values: Sequence[float], variance: Variance, own_error: float = 0.0) -> Estimate:
    """Predict one more value of a population from known values: the speed of the next run from those of some runs.

    ``variance`` is the variance between values, with these values already in it. ``own_error`` is the standard error
    that the mean of ``values`` has because each value was itself measured over a few steps only.
    """
    mean = math.fsum(values) / len(values)
    error = math.hypot(variance.deviation * math.sqrt(1 + 1 / len(values)), own_error)
    return Estimate(mean, error, variance.degrees)


def difference(first: Estimate, second: Estimate) -> Estimate:
    """Estimate ``first - second`` of two independent means, with degrees of freedom by Welch and Satterthwaite."""
    error = math.hypot(first.error, second.error)
    if error == 0:
        return Estimate(first.mean - second.mean, 0.0, math.inf)
    parts = [(e.error / error) ** 4 / e.degrees for e in (first, second) if e.degrees > 0]
    total = math.fsum(parts)
    return Estimate(first.mean - second.mean, error, 1 / total if total else math.inf)


def expected_excess(estimate: Estimate, threshold: float = 0.0) -> float:
    """Return the expected value of ``max(0, true mean - threshold)``, where the mean's error is normal.

    This is the expected improvement of Bayesian optimization.
    """
    beyond = estimate.mean - threshold
    if estimate.error == 0 or not math.isfinite(estimate.error):
        return max(0.0, beyond)
    z = beyond / estimate.error
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return estimate.error * density + beyond * upper_tail(-z, math.inf)


def upper_tail(t: float, degrees: float) -> float:
    """Return the probability that Student's t with these degrees of freedom is above ``t``."""
    if math.isinf(degrees):
        return 0.5 * math.erfc(t / math.sqrt(2))
    beyond = 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))
    return beyond if t >= 0 else 1 - beyond


@functools.lru_cache(maxsize=1024)
def quantile(degrees: float, confidence: float = CONFIDENCE) -> float:
    """Return the t between whose negative and itself Student's t lies with a probability of ``confidence``.

    ``quantile(2)`` is 4.30, ``quantile(math.inf)`` 1.96.
    """
    tail = (1 - confidence) / 2
    t: float = NormalDist().inv_cdf(1 - tail)
    if math.isinf(degrees):
        return t
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    # Newton's method: from a normal's quantile on, which is less, the tail is convex, so that no step goes too far.
    while True:
        density = scale * (1 + t * t / degrees) ** (-(degrees + 1) / 2)
        step: float = (upper_tail(t, degrees) - tail) / density
        t += step
        if step < 1e-12 * t:
            return t


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by a continued fraction (DLMF 8.17.22, Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * value / a


def _away_from_zero(value: float) -> float:
    """Return a number that is safe to divide by."""
    return value if abs(value) > 1e-300 else 1e-300
