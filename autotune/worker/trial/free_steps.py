"""Measure free steps: they end without waiting for the device, as in a run whose host goes on while the GPU computes.

Timed steps wait at their ends, so that each can be told apart. The gain of a host that goes on shows only over many
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.outcome import Measurement
from autotune.worker.trial.batch_shapes import Timed, expected_seconds

# Seconds that free steps take together, about, and their least and largest number. Choices.
_SECONDS, _FEWEST, _MOST = 1.0, 4, 100
# Free steps end after so many times the steps that are wanted, however many had new shapes. A choice.
_PATIENCE = 3


def most_free_steps(candidate: Candidate) -> int:
    """Return the most free steps of a trial, which end without waiting for the device; 0 for a blocking arm."""
    return _MOST if candidate.arm.non_blocking else 0


class FreeSteps:
    """Steps after the timed ones that end without waiting for the device; only a ``non_blocking`` candidate has any."""

    def __init__(self, candidate: Candidate) -> None:
        self._most = most_free_steps(candidate)
        self._wanted = 0
        self._left = 0
        self._previous_mark: Any = None
        """Mark at the end of the step before; ``None`` where the next step cannot be timed."""
        self._counted: list[tuple[Any, Any, float]] = []
        """Marks at the begin and end of each step that counts, and its tokens."""

    @property
    def is_under_way(self) -> bool:
        """Whether free steps have begun and are not all run."""
        return self._left > 0 and len(self._counted) < self._wanted

    def begin(self, measured: Measurement) -> None:
        """Plan free steps, if any, for about a second; the first is not timed, since it begins with an idle GPU."""
        steps = math.ceil(_SECONDS / (measured.steady_step_seconds or measured.step_seconds))
        self._wanted = min(self._most, max(_FEWEST, steps))
        # Steps with new shapes do not count, but come to an end, too.
        self._left = min(self._most, _PATIENCE * self._wanted)

    def ends(self, mark: Any, tokens: float, *, counts: bool) -> None:
        """Record the end of a free step at ``mark``. A step with new shapes or a save of a checkpoint does not count.

        A discarded step has the mark ``None``: the step after it has no begin, and cannot be timed either.
        """
        if counts and self._previous_mark is not None:
            self._counted.append((self._previous_mark, mark, tokens))
        self._previous_mark = mark
        self._left -= 1

    def scaled(
        self, measured: Measurement, timed: Sequence[Timed], seconds_between: Callable[[Any, Any], float]
    ) -> Measurement:
        """Return ``measured``, the measurement of ``timed`` steps, with its times scaled to those of the free steps.

        The device has to have finished the last free step. The saved time is first subtracted from the wait for data,
        since a host that goes on loads data meanwhile. The cost of new shapes and the energy of a sample stay. Fewer
        than ``_FEWEST`` free steps that count change nothing.
        """
        if len(self._counted) < _FEWEST:
            return measured
        free_seconds = sum(seconds_between(begin, end) for begin, end, _ in self._counted)
        ratio = free_seconds / expected_seconds(timed, [tokens for *_, tokens in self._counted])
        steady_seconds = measured.steady_step_seconds or measured.step_seconds
        saved_seconds = steady_seconds * (1 - ratio)
        step_seconds = measured.step_seconds - saved_seconds
        return replace(
            measured,
            step_seconds=step_seconds,
            steady_step_seconds=steady_seconds - saved_seconds,
            step_seconds_each=tuple(each * ratio for each in measured.step_seconds_each),
            samples_per_second=measured.samples_per_second * measured.step_seconds / step_seconds,
            data_seconds=max(0.0, (measured.data_seconds or 0.0) - max(0.0, saved_seconds)),
        )
