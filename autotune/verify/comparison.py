"""Compare the speed that was promised of a next run with the speed that a run obtained, by their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.core.statistics import estimate_mean

Verdict = Literal["kept", "missed", "cannot_tell"]

TELLING_SLACK = 0.2
"""Where a run that is slower by more than this would not be refuted, a promise that is kept says little."""


@dataclass(frozen=True)
class Interval:
    """A speed in samples a second, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width over the mean; infinite where the interval has no end."""
        return (self.high - self.low) / 2 / self.mean

    def scaled(self, factor: float) -> Interval:
        """Return the interval of a speed that is ``factor`` times this one."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)


def mean_speed(samples_per_second: float, stretches: Sequence[float]) -> Interval:
    """Return the interval of a run's mean speed, from the speeds of its consecutive stretches.

    Stretches are means of several steps each, so neighbouring steps that are slow together widen the interval. One
    stretch alone has no known variance: its interval has no ends.
    """
    share = estimate_mean(stretches, relative_prior=None).relative_half_width() if stretches else math.inf
    return Interval(samples_per_second, max(0.0, samples_per_second * (1 - share)), samples_per_second * (1 + share))


def slack(promised: Interval, obtained: Interval) -> float:
    """Return how much slower than promised a run as noisy as this one could be and not be refuted, as a share."""
    noise = obtained.high / obtained.mean
    return 1 - promised.low / promised.mean / noise


def compare(promised: Interval, obtained: Interval) -> Verdict:
    """Return whether a run kept what was promised of it.

    It missed it where its interval lies wholly below the promised one. It kept it where its speed lies in the promised
    interval or above, unless the two intervals are so wide that hardly any speed would have missed. In between nobody
    can tell.
    """
    if obtained.high < promised.low:
        return "missed"
    if obtained.low >= promised.mean:
        return "kept"
    if slack(promised, obtained) > TELLING_SLACK or obtained.mean < promised.low:
        return "cannot_tell"
    return "kept"
