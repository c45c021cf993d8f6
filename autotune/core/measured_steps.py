"""Estimate the time of a step from the steps that were measured, and decide whether they are enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autotune.core.outcome import Effort
from autotune.core.statistics import Estimate, estimate_mean

# Of at least five steps, one that took at least 1.5 times as long as every other is taken for delayed from outside
# (another process, a page fault) and dropped. Both numbers are a choice, not a measurement.
_DELAY_FROM = 5
_DELAY_TIMES = 1.5


class StepEstimate(NamedTuple):
    """A mean step time with its uncertainty."""

    seconds: float
    relative_half_width: float
    """Half the 95 % interval, relative to the mean; infinite where it is not known."""


def without_delay(seconds: Sequence[float]) -> list[float]:
    """Return the steps without a single one that was delayed from outside."""
    if len(seconds) < _DELAY_FROM:
        return list(seconds)
    slowest, next_slowest = sorted(seconds)[-1:-3:-1]
    if slowest <= _DELAY_TIMES * next_slowest:
        return list(seconds)
    return [each for each in seconds if each != slowest]


def mean_step(seconds: Sequence[float]) -> Estimate:
    """Estimate the mean step time of a process, in seconds, from a few of its steps."""
    return estimate_mean(without_delay(seconds))


def is_enough(seconds: Sequence[float], effort: Effort, relative_half_width: float) -> bool:
    """Return whether enough steps were measured.

    ``seconds`` are the steps as they were run; ``relative_half_width`` is that of the interval estimated from them.
    """
    count = len(seconds)
    if count < min(2, effort.max_steps):
        return False
    if count >= effort.max_steps or sum(seconds) >= effort.max_seconds:
        return True
    if sum(seconds) < effort.min_seconds:
        return False
    return count >= effort.min_steps and relative_half_width <= effort.target_spread
