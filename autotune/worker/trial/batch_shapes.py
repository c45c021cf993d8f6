"""Find which shapes of batches are new to a training's process, and estimate the time of a step and of a new shape.

For a shape that it has not run yet, a GPU's libraries choose, compile and load kernels. With batches padded to their
longest sample nearly all of the first steps have new shapes, and few of a long training's steps do.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from autotune.core.lengths import PlannedRun
from autotune.core.measured_steps import StepEstimate, mean_step
from autotune.core.statistics import quantile
from autotune.worker.arrays import arrays_by_place
from autotune.worker.dataset.prepared import GROUP


class BatchShapes:
    """Counts the tokens and the new shapes of the current step's batches.

    A shape is new in the first ``settles`` micro-batches that have it: in one, or in several where a CUDA graph is
    captured after them. With 0 no shape is new, as on a CPU, where a new shape takes no longer.
    """

    def __init__(self, *, settles: int) -> None:
        self.settles = settles
        self._seen: Counter[Hashable] = Counter()
        self._tokens: list[int] = []
        self.new = 0.0
        """Number of new shapes in this step: each micro-batch with a new shape adds 1 / ``settles``."""
        self.ended: list[bool] = []
        """Whether each step so far had new shapes."""
        self.longest_row = 0
        """Most tokens of a row so far, with padding; 0 where batches have no tokens."""

    def take(self, batch: Any) -> None:
        """Record a batch before the step trains on it."""
        shapes = {place: tuple(array.shape) for place, array in arrays_by_place(batch)}
        key = tuple(shapes.items())
        if self._seen[key] < self.settles:
            # All micro-batches in which a shape is new add up to one new shape.
            self.new += 1 / self.settles
        self._seen[key] += 1
        rows = [shape for place, shape in shapes.items() if place.endswith("input_ids") and len(shape) == 2]
        samples, tokens = rows[0] if rows else (0, 0)
        self._tokens.append(samples * tokens)
        self.longest_row = max(self.longest_row, tokens)

    def take_capture(self) -> None:
        """Count a CUDA graph capture in this step as a micro-batch with a new shape, unless one is counted already."""
        self.new = max(self.new, 1 / max(1, self.settles))

    @property
    def count(self) -> int:
        """Number of different shapes so far."""
        return len(self._seen)

    def end_step(self) -> tuple[float, float]:
        """Return the step's number of new shapes, and its mean tokens in a micro-batch, and begin the next step.

        The tokens include padding; 0 where they are unknown.
        """
        ended = self.new, statistics.fmean(self._tokens) if self._tokens else 0.0
        self.ended.append(self.new > 0)
        self.new, self._tokens = 0.0, []
        return ended


class Timed(NamedTuple):
    """A timed step."""

    seconds: float
    tokens: float
    """Tokens of the candidate's whole step, padding included; 0 where not known."""
    new_shapes: float
    data_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    micro_seconds: float = 0.0
    """Time of a micro-step that adds to existing gradients, and does not exchange them between ranks; 0 where none was
    run."""
    saving_seconds: float = 0.0
    """Spent in ``torch.save``, and not part of ``seconds``."""
    real_tokens: int | None = None
    """Tokens that were run, without padding; ``None`` where they were not seen."""


class RunEstimate(NamedTuple):
    """The mean step of a run, and its parts: steps of known shapes, and the extra time of new ones."""

    step: StepEstimate
    """The mean step, new shapes included."""
    steady_error: float
    """Standard error of the mean step whose shapes were all seen before, over ``step``; infinite where not known."""
    steady_seconds: float
    """The mean step whose shapes were all seen before; of steps with new ones, where there are no others."""
    shape_seconds: float | None
    """Extra time of a new shape; ``None`` where none was timed beside steps of known shapes."""


def without_new(steps: Sequence[Timed]) -> list[Timed]:
    """Return the steps without new shapes, for the time of a step in the long run.

    Where there are too few (none, or one of more than ``GROUP`` steps), return all steps.
    """
    known = [step for step in steps if not step.new_shapes]
    return known if len(known) >= (1 if len(steps) <= GROUP else 2) else list(steps)


def estimate_run(steps: Sequence[Timed], run: PlannedRun) -> RunEstimate:
    """Estimate the mean step of a run from timed steps; the half-width is infinite with fewer than two steps.

    Steps differ because the tokens of their batches do. A regression on tokens removes this part from the residuals,
    and corrects the mean where the timed steps are larger or smaller than the run's mean step. The extra time of steps
    with new shapes is the cost of a shape. The largest of these times counts once in a run: code is compiled anew when
    a second length comes.
    """
    known = without_new(steps)
    line = _Line(known, run)
    new = [step for step in steps if step.new_shapes and len(known) < len(steps)]
    if not new:
        return RunEstimate(line.mean, line.error, line.mean.seconds, None)
    extras = [step.seconds - step.data_seconds - (line.at(step.tokens) - line.data_seconds) for step in new]
    shape_seconds = max(0.0, sum(extras) / sum(step.new_shapes for step in new))
    if run.steps is None or run.new_shapes is None:
        return RunEstimate(line.mean, line.error, line.mean.seconds, shape_seconds)
    times = sorted((extra, step.new_shapes) for extra, step in zip(extras, new, strict=True))
    # The largest extra time is taken out of the list, and the others are averaged over their shapes.
    once_seconds, once_shapes = times.pop() if len(times) > 1 else (0.0, 0.0)
    later_shapes = max(0.0, run.new_shapes - once_shapes)
    later_seconds = max(0.0, sum(extra for extra, _ in times) / sum(count for _, count in times))
    of_each = [extra / count for extra, count in times]
    # The spread of a single extra time is unknown, so its size is taken as the error.
    error = later_seconds
    if len(of_each) > 1:
        error = quantile(len(of_each) - 1) * statistics.stdev(of_each) / math.sqrt(len(of_each))
    all_seconds, steady = max(0.0, once_seconds) + later_seconds * later_shapes, line.mean.seconds
    seconds = steady + all_seconds / run.steps
    half_width = math.hypot(steady * line.mean.relative_half_width, error * later_shapes / run.steps)
    step = StepEstimate(seconds, half_width / seconds)
    if run.new_shapes:
        shape_seconds = all_seconds / run.new_shapes
    return RunEstimate(step, line.error * steady / seconds, steady, shape_seconds)


def expected_seconds(steps: Sequence[Timed], tokens: Sequence[float]) -> float:
    """Return the seconds that steps with so many tokens, of known shapes, would take together, from timed steps."""
    line = _Line(without_new(steps), PlannedRun(varies=True))
    return sum(map(line.at, tokens))


class _Line:
    """The seconds of ``steps`` as a line over their tokens (flat where these are equal), and its value for ``run``."""

    def __init__(self, steps: Sequence[Timed], run: PlannedRun) -> None:
        seconds = np.array([step.seconds for step in steps])
        tokens = np.array([step.tokens for step in steps])
        count, mean = len(seconds), float(seconds.mean())
        self._slope, self._mean_tokens, self._mean_seconds = 0.0, float(tokens.mean()), mean
        self.data_seconds = statistics.fmean(step.data_seconds for step in steps)
        self.error = math.inf
        """Standard error of the mean, relative to it."""
        if count < 2:
            self.mean = StepEstimate(mean, math.inf)
            return
        differ = float(tokens.std()) > 1e-6 * self._mean_tokens
        if not run.varies and not differ:
            own = mean_step(seconds.tolist())
            self.error = own.error / own.mean
            self.mean = StepEstimate(own.mean, own.relative_half_width())
            return
        # ``share`` is the variance of the mean over that of a single step.
        residuals, unknowns, share = seconds - mean, 1, 1 / count
        if count > 2 and differ:
            self._slope = max(0.0, float(np.polyfit(tokens, seconds, 1)[0]))
            residuals, unknowns = residuals - self._slope * (tokens - self._mean_tokens), 2
        if run.step_tokens:
            distance = run.step_tokens - self._mean_tokens
            mean += self._slope * distance
            if self._slope:
                # The farther the run's mean step is from the timed ones, the more the error of the slope counts.
                share += distance**2 / float(((tokens - self._mean_tokens) ** 2).sum())
        self.error = float(np.sqrt((residuals**2).sum() / (count - unknowns) * share)) / mean
        self.mean = StepEstimate(mean, quantile(count - unknowns) * self.error)

    def at(self, tokens: float) -> float:
        """Return the seconds of a step with so many tokens."""
        return self._mean_seconds + self._slope * (tokens - self._mean_tokens)
