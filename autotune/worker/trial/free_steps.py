"""Measure free steps: they end without waiting for the device, as in a run whose host goes on while the GPU computes.

Timed steps wait at their ends, so that each can be told apart. The gain of a host that goes on shows only over many
steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from autotune.core.candidate import Candidate
from autotune.core.outcome import Measurement
from autotune.worker.trial.batch_shapes import Timed, expected_seconds

# Seconds that free steps take together, about, and their least and largest number. The first step begins with an idle
# GPU, which takes 4 ms of 9 ms with distilbert (H200). Choices.
_SECONDS, _FEWEST, _MOST = 1.0, 4, 100
# Free steps are begun at most so often: again after a step with new shapes, or one that the end of the data cuts short.
# A choice.
_MOST_BEGUN = 4


def most_free_steps(candidate: Candidate) -> int:
    """Return the most steps that are measured without waiting for the device at the end of each."""
    return _MOST if candidate.arm.non_blocking else 0


class FreeSteps:
    """Steps after the timed ones of a candidate whose host goes on while the GPU computes; none of another."""

    def __init__(self, candidate: Candidate) -> None:
        self._left = _MOST_BEGUN if candidate.arm.non_blocking else 0
        """How often they may be begun."""
        self._steps = 0
        self._began = 0.0
        self._tokens: list[float] = []
        self.is_under_way = False

    def begin(self, measured: Measurement) -> bool:
        """Begin the free steps, or begin them again; return ``False`` after ``_MOST_BEGUN`` times, or without any.

        The device has to be idle.
        """
        self.is_under_way = self._left > 0
        self._left -= 1
        steps = math.ceil(_SECONDS / (measured.steady_step_seconds or measured.step_seconds))
        self._steps = min(_MOST, max(_FEWEST, steps))
        self._tokens = []
        self._began = perf_counter()
        return self.is_under_way

    def ends(self, tokens: float) -> bool:
        """Record the end of a step with so many tokens; return whether it is the last."""
        self._tokens.append(tokens)
        self.is_under_way = len(self._tokens) < self._steps
        return not self.is_under_way

    def measured(self, measured: Measurement, timed: Sequence[Timed], saving_seconds: float) -> Measurement:
        """Return the measurement of ``timed`` steps, with its times scaled to those of the free steps.

        The device has to have finished the last free step. The saved time is first subtracted from the wait for data,
        since a host that goes on loads data meanwhile. The cost of new shapes and the energy of a sample stay.
        """
        seconds = perf_counter() - self._began - saving_seconds
        ratio = seconds / expected_seconds(timed, self._tokens)
        steady = measured.steady_step_seconds or measured.step_seconds
        saved = steady * (1 - ratio)
        step_seconds = measured.step_seconds - saved
        return replace(
            measured,
            step_seconds=step_seconds,
            steady_step_seconds=steady - saved,
            step_seconds_each=tuple(each * ratio for each in measured.step_seconds_each),
            samples_per_second=measured.samples_per_second * measured.step_seconds / step_seconds,
            data_seconds=max(0.0, (measured.data_seconds or 0.0) - max(0.0, saved)),
        )
