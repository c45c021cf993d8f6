"""Compare the promised speed of the next run with the speed of a run, by their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.core.statistics import estimate_mean
from autotune.core.units import format_rate, format_spread, is_lopsided

Verdict = Literal["kept", "missed", "cannot_tell", "faster"]

TELLING_SLACK = 0.2
"""Share of slow-down that a run must be able to refute. Above it, agreement with the promise says little. A choice."""


@dataclass(frozen=True)
class Interval:
    """A speed in samples a second, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width over the mean; infinite where the interval is unbounded."""
        return (self.high - self.low) / 2 / self.mean

    def scaled(self, factor: float) -> Interval:
        """Return this interval for a speed that is ``factor`` times as high."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)

    @property
    def is_lopsided(self) -> bool:
        """Whether one side is so much wider than the other that ± would say something else than both ends."""
        return is_lopsided(self.mean, self.low, self.high)


def describe_speed(speed: Interval) -> str:
    """Return ``320.0 ± 1.2%``, or ``305.4 (190.7 to 764.2)`` where that is lopsided.

    ``51.8 (15.4 or more)`` where it has no upper end.
    """
    if math.isinf(speed.high):
        return f"{format_rate(speed.mean)} ({format_rate(speed.low)} or more)"
    if speed.is_lopsided:
        return f"{format_rate(speed.mean)} ({describe_ends(speed)})"
    return f"{format_rate(speed.mean)}{format_spread(speed.relative_half_width)}"


def describe_ends(interval: Interval) -> str:
    """Return ``310.4 to 329.6``."""
    return f"{format_rate(interval.low)} to {format_rate(interval.high)}"


def mean_speed(samples_per_second: float, stretches: Sequence[float]) -> Interval:
    """Return the interval of a run's mean speed, from the speeds of its consecutive stretches.

    A stretch is the mean of several steps, so neighbouring steps that are slow together widen the interval. From a
    single stretch no variance is known, so its interval is unbounded.

    A run's mean speed is that of its total time, so the interval is that of the mean seconds a sample, and its ends are
    turned into speeds. A stall of the host in one stretch then widens it to the speed of the other stretches at least:
    one stall does not refute a promise. What the run cannot reach even without its slowest stretch, it cannot reach.
    """
    if not stretches:
        return Interval(samples_per_second, 0.0, math.inf)
    seconds = [1 / speed for speed in stretches]
    mean = math.fsum(seconds) / len(seconds)
    least, most = _ends_of_mean(seconds)
    slowest = seconds.index(max(seconds))
    least_without_slowest, _ = _ends_of_mean(seconds[:slowest] + seconds[slowest + 1 :])
    least = max(least, least_without_slowest)
    high = samples_per_second * mean / least if least else math.inf
    return Interval(samples_per_second, samples_per_second * mean / most, high)


def _ends_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the interval of a mean of positive values; 0 and infinity where it is unbounded."""
    if len(values) < 2:
        return 0.0, math.inf
    estimate = estimate_mean(values, relative_prior=None)
    half = estimate.half_width()
    return max(0.0, estimate.mean - half), estimate.mean + half


def slack(promised: Interval, obtained: Interval) -> float:
    """Return the largest relative slow-down that a run as noisy as this one would not refute."""
    noise = obtained.high / obtained.mean
    return 1 - promised.low / promised.mean / noise


def compare(promised: Interval, obtained: Interval) -> Verdict:
    """Return whether a run kept its promise.

    It is missed where the run's interval lies wholly below the promised one. It is kept where the run's speed lies in
    the promised interval, unless both intervals are so wide that hardly any speed would have missed. A run whose speed
    lies above the promised interval is faster than promised: the search measured too low. In all other cases nobody can
    tell.
    """
    if obtained.high < promised.low:
        return "missed"
    is_sure = obtained.low >= promised.mean or slack(promised, obtained) <= TELLING_SLACK
    if not is_sure or obtained.mean < promised.low:
        return "cannot_tell"
    return "faster" if obtained.mean > promised.high else "kept"
