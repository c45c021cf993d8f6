"""Estimate the time of a step from the steps that were measured, and decide whether they are enough."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from autotune.core.outcome import Effort
from autotune.core.statistics import Estimate, estimate_mean

ACCEPT_NOISE_VARIABLE = "AUTOTUNE_ACCEPT_NOISE"


def accepts_noise() -> bool:
    """Return whether the user accepts measurements on a busy machine, by setting ``ACCEPT_NOISE_VARIABLE`` to 1."""
    return os.environ.get(ACCEPT_NOISE_VARIABLE) == "1"


LEAST_CORE_WAIT = 0.1
"""A trial that waits for cores for less of its time is no more than noisy. A quiet machine shows 0 to 3 %. A choice."""
# A step that took so many times the median is slow. It belongs to the mean, since logging or opening a file recurs in
# a run. Causes outside the training, clocks and other processes, are detected elsewhere: the trial is then disturbed.
_SLOW_TIMES = 1.5
# Where a step was slow, up to ``_LONGER`` times the usual steps and seconds are measured, until ``_TIMES_SEEN`` slow
# steps came at equal distances. All are choices, tried on simulated runs (tests/core/test_measured_steps.py).
_LONGER = 3
_TIMES_SEEN = 3


class StepEstimate(NamedTuple):
    """A mean step time with its uncertainty."""

    seconds: float
    relative_half_width: float
    """Half the 95 % interval, relative to the mean; infinite where it is not known."""


def _slow_at(seconds: Sequence[float]) -> list[int]:
    """Return the indices of the steps that are much slower than the median step."""
    least_seconds = _SLOW_TIMES * statistics.median(seconds)
    return [index for index, step_seconds in enumerate(seconds) if step_seconds >= least_seconds]


def _periods(seconds: Sequence[float]) -> tuple[list[float], int] | None:
    """Return the steps between the first and the last slow step, and the distance of slow steps.

    The last slow step is included, so that these are whole periods. ``None`` where slow steps are few, or come at
    different distances.
    """
    slow = _slow_at(seconds)
    gaps = {later - earlier for earlier, later in itertools.pairwise(slow)}
    if len(slow) < _TIMES_SEEN or len(gaps) != 1:
        return None
    return list(seconds[slow[0] + 1 : slow[-1] + 1]), gaps.pop()


def mean_step(seconds: Sequence[float]) -> Estimate:
    """Estimate the mean step time of a process, in seconds, from a few measured steps.

    Where slow steps recur at equal distances, the mean is that of whole periods. Slow steps then deviate from the mean
    slow step, and others from the mean of the others. Slow steps that were not seen to recur widen the interval.
    """
    if (found := _periods(seconds)) is None:
        return estimate_mean(seconds)
    steps, period = found
    mean = statistics.fmean(steps)
    # Each step moved by the difference between the mean of its kind, slow or not, and the mean of all.
    centred: list[float] = []
    for of_kind in (steps[period - 1 :: period], [step for number, step in enumerate(steps, 1) if number % period]):
        # A few steps are nearer to their own mean than to the true one, so their deviations are widened.
        wider = math.sqrt(len(of_kind) / (len(of_kind) - 1)) if len(of_kind) > 1 else 1.0
        centred += [mean + wider * (step - statistics.fmean(of_kind)) for step in of_kind]
    # So many steps need no prior of how much they differ.
    return estimate_mean(centred, None)


def most_measured_steps(effort: Effort) -> int:
    """Return the largest number of steps to time, if a step was slow and measuring waits until it recurs."""
    return effort.max_steps if effort.max_steps < _TIMES_SEEN else _LONGER * effort.max_steps


def is_enough(seconds: Sequence[float], effort: Effort, relative_half_width: float, *, are_alike: bool = True) -> bool:
    """Return whether enough steps were measured.

    ``seconds`` are the steps as they were run; ``relative_half_width`` is that of the interval estimated from them.
    Where a step was slow, measuring goes on until slow steps recur, for a while. It does not where ``are_alike`` is
    false: batches differ, or something outside is seen to delay some steps.
    """
    count = len(seconds)
    # One step has no interval.
    if count < min(2, effort.max_steps):
        return False
    may_go_on = count < most_measured_steps(effort) and sum(seconds) < _LONGER * effort.max_seconds
    if may_go_on and are_alike and relative_half_width > effort.target_spread:
        has_slow_step_once = bool(_slow_at(seconds)) and _periods(seconds) is None
        if has_slow_step_once:
            return False
    if count >= effort.max_steps or sum(seconds) >= effort.max_seconds:
        return True
    if sum(seconds) < effort.min_seconds:
        return False
    return count >= effort.min_steps and relative_half_width <= effort.target_spread
