"""Choose the next candidate from what is known, without Optuna or processes.

With several trials running, those that have not ended count as tried. A decision that needs all results (that nothing
at a multiple fits, that nothing else is left) waits for them: the policy then proposes nothing.
"""

from __future__ import annotations

from typing import Protocol

from autotune.core.candidate import Arm, Candidate
from autotune.core.options import Objective, SamplerName
from autotune.core.stop import NOTHING_LEFT, Stop
from autotune.estimate.feasibility import Judge, failed_without_verdict
from autotune.estimate.history import History, Tried, batch_of
from autotune.space.levers import memory_class
from autotune.space.space import LARGEST_FREE_BATCH, Space
from autotune.tuning.acquisition import Acquisition

# First free batch where nothing is known: fits most models on most cards, and is not slow. A choice.
_FREE_START = 32
# Largest ratio of two batches whose slope is used; that between nearer batches is mostly noise.
_FAR_ENOUGH = 0.75


class Policy(Protocol):
    """Proposes candidates until it has seen enough."""

    @property
    def ending(self) -> Stop:
        """Why a search ends for which it has no proposal."""

    def next(self, history: History) -> Candidate | None:
        """Return the next candidate to run; ``None`` where none is worth it, or a running trial has to end first."""


class _ArmView:
    """The trials of one arm by per-device batch."""

    def __init__(self, space: Space, arm: Arm, history: History) -> None:
        self._space, self._judge = space, Judge(space, history)
        self.arm, self.history = arm, history
        self.tried = {batch_of(t): t for t in history.tried if self._counts(t)}
        self.feasible = {batch_of(t): t for t in history.believed() if self._counts(t)}
        self.failed = {batch for batch, tried in self.tried.items() if failed_without_verdict(tried)}
        self.pending = {c.per_device_train_batch_size for c in history.pending if c.arm == arm and space.contains(c)}
        self.doubtful = self._judge.is_doubtful(arm)

    def _counts(self, tried: Tried) -> bool:
        return tried.candidate.arm == self.arm and self._space.contains(tried.candidate)

    def open(self, batch: int) -> bool:
        """Return whether the batch was neither tried, nor is it under way, nor ruled out."""
        return self._judge.is_open(self._space.candidate(self.arm, batch))


class MaxBatchPolicy:
    """Finds the largest batch that stays under the line, and shows that the next one does not.

    Arms with checkpointing come first, since they need the least memory; later arms are only tried above the largest
    batch so far. Between a batch that fits and one that does not, peak memory is nearly affine in the batch, so the
    search aims at the boundary instead of bisecting.
    """

    ending = NOTHING_LEFT

    def __init__(self, space: Space) -> None:
        self._space = space
        self._arms = sorted(space.arms, key=lambda arm: not arm.gradient_checkpointing)

    def next(self, history: History) -> Candidate | None:
        """See ``Policy.next``."""
        judge = Judge(self._space, history)
        for multiple in self._space.batches.levels():
            seen = set()
            for arm in self._arms:
                if memory_class(arm) in seen:
                    continue
                view = _ArmView(self._space, arm, history)
                if not view.doubtful:
                    if not view.failed:
                        # This arm may fail for reasons other than memory, where another of its memory class does not.
                        seen.add(memory_class(arm))
                    batch = self._next_batch(view, multiple)
                    if batch is not None:
                        return self._space.candidate(arm, batch)
                    if view.pending:
                        # Whether other arms can beat this one is known only after it is.
                        return None
            if history.pending or judge.fits_at(multiple):
                return None
        return judge.last_resort()

    def _next_batch(self, view: _ArmView, multiple: int) -> int | None:
        among = [t.candidate for t in view.history.tried if self._space.contains(t.candidate)]
        largest = view.history.largest(among)
        floor = batch_of(largest) if largest else 0
        if self._space.batches.effective_batch is not None:
            rungs = [b for b in self._space.batches.at_level(multiple) if b > floor and view.open(b)]
            return rungs[len(rungs) // 2] if rungs else None
        over = view.history.smallest_over(view.arm, accumulates=False)
        if len(view.failed) > 1:
            # Failures at several batches are treated as a limit other than memory.
            over = min([*view.failed, over or LARGEST_FREE_BATCH + 1])
        least = (floor // multiple + 1) * multiple
        most = self._space.batches.most
        most = (most if over is None else min(most, over - 1)) // multiple * multiple
        if least > most:
            return None
        predicted = view.history.memory and view.history.memory.largest_batch(view.arm)
        if predicted and not view.tried:
            aimed = max(predicted, least)
        elif predicted and view.feasible and over is None and max(view.feasible) <= predicted:
            # The prediction says that the next batch does not fit; a trial has to show it.
            aimed = least
        elif view.feasible:
            aimed = self._aim(view, multiple, max(view.feasible), over)
        elif predicted and over is not None:
            # A batch that was aimed at did not fit: the boundary is near.
            aimed = over - (multiple << (len(view.tried) - 1))
        elif floor:
            aimed = least
        else:
            aimed = max(multiple, _FREE_START) if over is None else over // 2
        aimed = max(least, min(aimed // multiple * multiple, most))
        # A failed batch says nothing about memory, so a neighbour is tried instead. Next to a running trial it is the
        # larger neighbour: if the running one fits, the next has to be shown not to.
        beside = (1, -1, 2, -2) if aimed in view.pending else (-1, 1, -2, 2)
        near = (aimed + away * multiple for away in (0, *beside))
        return next((b for b in near if least <= b <= most and b not in view.tried and b not in view.pending), None)

    def _aim(self, view: _ArmView, multiple: int, fits: int, over: int | None) -> int:
        """Return the batch at which the line through two measured peaks meets the ceiling's line."""
        peaks: dict[int, int] = {
            b: t.measurement.judged_bytes(view.arm) for b, t in view.tried.items() if t.measurement
        }
        far = [b for b in peaks if b <= _FAR_ENOUGH * fits]
        above = [b for b in peaks if b > fits]
        other = min(above) if above else max(far, default=None)
        middle = fits * 2 if over is None else (fits + over) // 2
        if other is None:
            return middle
        slope = (peaks[fits] - peaks[other]) / (fits - other)
        line_bytes = view.history.ceiling.line_bytes
        aimed = int(fits + (line_bytes - peaks[fits]) / slope) if slope > 0 else LARGEST_FREE_BATCH
        if over is None:
            return min(aimed, fits * 4)
        if aimed < over:
            return aimed
        # A near miss: the boundary is just below it, nearer than the middle.
        missed = sum(view.history.is_over(tried) for tried in view.tried.values())
        return max(middle, over - (max(multiple, (over - fits) // 8) << max(0, missed - 1)))


class ExhaustivePolicy:
    """Yields every candidate of the largest multiple that has any, in order, except those known not to fit."""

    ending = NOTHING_LEFT

    def __init__(self, space: Space) -> None:
        self._space = space

    def next(self, history: History) -> Candidate | None:
        """See ``Policy.next``."""
        judge = Judge(self._space, history)
        for multiple in self._space.batches.levels():
            for arm in self._space.arms:
                for batch in self._space.batches.at_level(multiple):
                    candidate = self._space.candidate(arm, batch)
                    if judge.is_open(candidate):
                        return candidate
            if history.pending or judge.fits_at(multiple):
                return None
        return judge.last_resort()


def make_policy(sampler: SamplerName, objective: Objective, space: Space) -> Policy:
    """Return the policy of a sampler's name, which is none of Optuna's."""
    if sampler == "grid":
        return ExhaustivePolicy(space)
    return MaxBatchPolicy(space) if objective == "max-batch" else Acquisition(space)
