"""Which candidate to run next, given what is known: pure decisions, no Optuna, no processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from autotune.history import NOISE, History, Tried, memory_class
from autotune.space import DEFAULT_MULTIPLE, Space
from autotune.trial import Arm, Candidate, Failed

Objective = Literal["throughput", "max-batch"]

# An arm whose best trial is this far behind is not followed to smaller batches, which do not get
# faster: on recorded landscapes halving a batch gained at most 3 %.
_HOPELESS = 0.75
# Where a free batch starts when nothing is known: fits most models on most cards, and is no crawl.
_FREE_START = 32


class Policy(Protocol):
    """Proposes candidates until it has seen enough."""

    def next(self, history: History) -> Candidate | None:
        """The next candidate to run; ``None`` when none is worth it."""


def _speed(tried: Tried) -> float:
    return tried.measurement.samples_per_second if tried.measurement else 0.0


class _ArmView:
    """One arm's trials among those of a history, by batch."""

    def __init__(self, space: Space, arm: Arm, history: History) -> None:
        self.space, self.arm, self.history = space, arm, history
        self.tried = {t.candidate.per_device_train_batch_size: t for t in history.tried if self._counts(t)}
        believed = {t.candidate.per_device_train_batch_size: t for t in history.believed() if self._counts(t)}
        self.feasible = believed
        self.broken = any(isinstance(t.outcome, Failed) for t in self.tried.values())

    def _counts(self, tried: Tried) -> bool:
        return tried.candidate.arm == self.arm and self.space.contains(tried.candidate)

    def open(self, batch: int) -> bool:
        """Whether the batch was neither tried nor ruled out."""
        return batch not in self.tried and self.history.ruled_out_by(self.space.candidate(self.arm, batch)) is None

    def fastest(self) -> int:
        """The feasible batch with the most samples a second."""
        return max(self.feasible, key=lambda batch: _speed(self.feasible[batch]))


class ThroughputPolicy:
    """Climbs each arm from its largest batch (or a known good one) to the nearest best.

    Arms are taken in the space's order. A smaller batch is only tried next to the best known one of
    its arm, and not at all where the arm is hopeless or another arm that is never slower at the
    same batch has measured it.
    """

    def __init__(self, space: Space) -> None:
        self._space = space

    def next(self, history: History) -> Candidate | None:
        """See ``Policy.next``. A lower multiple is only looked at when nothing above it fits."""
        for multiple in self._space.batches.levels():
            ladder = self._space.batches.at_level(multiple)
            for arm in self._space.arms:
                view = _ArmView(self._space, arm, history)
                batch = None if view.broken or self._outclassed(arm, history) else self._next_batch(view, ladder)
                if batch is not None:
                    return self._space.candidate(arm, batch)
            if any(self._space.contains(t.candidate) for t in history.feasible()):
                return None
        return None

    def _outclassed(self, arm: Arm, history: History) -> bool:
        """fp32 is never faster than tf32 and needs the same memory; nor than its own twin in the space."""
        faster = dataclasses.replace(arm, precision="tf32")
        return arm.precision == "fp32" and faster in self._space.arms and bool(history.feasible(faster))

    def _next_batch(self, view: _ArmView, ladder: Sequence[int]) -> int | None:
        open_batches = [batch for batch in ladder if view.open(batch)]
        # The baseline's batch was not chosen for its speed, so climbing does not start from there.
        if not set(view.feasible) - {self._space.batches.baseline()[0]} and open_batches:
            return self._first_batch(view, open_batches)
        if not view.feasible:
            return None
        peak = view.fastest()
        above = [batch for batch in ladder if batch > peak]
        below = [batch for batch in ladder if batch < peak]
        if above and view.open(above[0]) and not self._saturated(view, peak):
            return above[0]
        if self._between_is_worth_it(view, peak, above):
            return self._between(view, peak, above[0])
        if below and view.open(below[-1]) and self._below_is_worth_it(view, peak, below[-1]):
            return below[-1]
        return None

    def _first_batch(self, view: _ArmView, open_batches: list[int]) -> int:
        if self._space.batches.effective_batch is not None:
            return max(open_batches)
        best = view.history.fastest()
        start = best.candidate.per_device_train_batch_size if best else _FREE_START
        return min(open_batches, key=lambda batch: max(batch / start, start / batch))

    def _saturated(self, view: _ArmView, peak: int) -> bool:
        """A free batch stops growing where a doubling no longer pays; a slow arm where it cannot catch up."""
        if self._space.batches.effective_batch is not None:
            return False
        smaller = [batch for batch in view.feasible if batch < peak]
        if smaller and _speed(view.feasible[peak]) < _speed(view.feasible[max(smaller)]) * (1 + NOISE):
            return True
        return self._hopeless(view, peak)

    def _hopeless(self, view: _ArmView, peak: int) -> bool:
        best = view.history.fastest()
        return best is not None and _speed(view.feasible[peak]) < _HOPELESS * _speed(best)

    def _between_is_worth_it(self, view: _ArmView, peak: int, above: list[int]) -> bool:
        """Between the best free batch and the first that does not fit lie untried multiples."""
        if self._space.batches.effective_batch is not None or not above or self._saturated(view, peak):
            return False
        between = self._between(view, peak, above[0])
        return between is not None and view.open(between)

    def _between(self, view: _ArmView, peak: int, above: int) -> int | None:
        """A batch about halfway to the smallest one known not to fit, while that is an eighth or more away."""
        multiple = self._space.batches.multiple or DEFAULT_MULTIPLE
        over = [b for b, t in view.tried.items() if b > peak and view.history.is_over(t)]
        limit = min([*over, above])
        middle = (peak + limit) // 2 // multiple * multiple
        return middle if peak < middle < limit and (limit - peak) * 8 > peak else None

    def _below_is_worth_it(self, view: _ArmView, peak: int, batch: int) -> bool:
        if self._hopeless(view, peak):
            return False
        candidate = self._space.candidate(view.arm, batch)
        for tried in view.history.feasible():
            same_batch = tried.candidate.per_device_train_batch_size == batch
            if same_batch and _never_slower(tried.candidate.arm, view.arm):
                return False
        return view.history.ruled_out_by(candidate) is None


def _never_slower(arm: Arm, other: Arm) -> bool:
    """Whether ``arm`` is ``other`` without checkpointing: it does the same work less the recomputation."""
    return other.gradient_checkpointing and dataclasses.replace(other, gradient_checkpointing=False) == arm


class MaxBatchPolicy:
    """Finds the largest batch that stays under the line and proves it: the next one does not.

    Arms that recompute come first, since they need least; later arms are only asked whether they
    can beat the largest batch so far. Between a batch that fits and one that does not, peak memory
    is nearly affine in the batch, so the boundary is aimed at rather than bisected.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._arms = sorted(space.arms, key=lambda arm: not arm.gradient_checkpointing)

    def next(self, history: History) -> Candidate | None:
        """See ``Policy.next``."""
        for multiple in self._space.batches.levels():
            seen = set()
            for arm in self._arms:
                if memory_class(arm) in seen:
                    continue
                view = _ArmView(self._space, arm, history)
                if not view.broken:
                    seen.add(memory_class(arm))
                    batch = self._next_batch(view, multiple)
                    if batch is not None:
                        return self._space.candidate(arm, batch)
            if any(self._space.contains(t.candidate) for t in history.feasible()):
                return None
        return None

    def _next_batch(self, view: _ArmView, multiple: int) -> int | None:
        largest = view.history.largest()
        record = largest.candidate.per_device_train_batch_size if largest else 0
        fits = max(view.feasible, default=0)
        over = min((b for b, t in view.tried.items() if view.history.is_over(t) and b > fits), default=None)
        floor = max(fits, record)
        if self._space.batches.effective_batch is not None:
            rungs = [b for b in self._space.batches.at_level(multiple) if b > floor and (over is None or b < over)]
            rungs = [b for b in rungs if view.open(b)]
            return rungs[len(rungs) // 2] if rungs else None
        if over is not None and over - floor <= multiple:
            return None
        if not view.feasible:
            start = floor + multiple if record else _FREE_START * multiple // DEFAULT_MULTIPLE or 1
            batch = start if over is None else (floor + over) // 2 // multiple * multiple
            return batch if batch > floor and view.open(batch) else None
        batch = self._aim(view, multiple, floor, over)
        return batch if view.open(batch) else None

    def _aim(self, view: _ArmView, multiple: int, floor: int, over: int | None) -> int:
        """The batch that the two largest known ones point to, kept strictly inside the open interval."""
        known = sorted((b, t.measurement.peak_reserved_bytes) for b, t in view.tried.items() if t.measurement)
        aimed = floor * 2
        if len(known) >= 2:
            (b0, m0), (b1, m1) = known[-2:]
            slope = (m1 - m0) / (b1 - b0)
            line = view.history.ceiling.line_bytes
            aimed = min(floor * 4, int(b1 + (line - m1) / slope)) if slope > 0 else floor * 2
        most = over - multiple if over is not None else aimed
        return max(floor + multiple, min(aimed, most)) // multiple * multiple


class ExhaustivePolicy:
    """Every candidate of the first level that holds any, in order, less what is known not to fit."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def next(self, history: History) -> Candidate | None:
        """See ``Policy.next``."""
        for multiple in self._space.batches.levels():
            for arm in self._space.arms:
                for batch in self._space.batches.at_level(multiple):
                    candidate = self._space.candidate(arm, batch)
                    if not history.outcomes_of(candidate) and history.ruled_out_by(candidate) is None:
                        return candidate
            if history.feasible():
                return None
        return None
