"""Choose the next candidate from what is known, without Optuna or processes.

With several trials running, those that have not ended count as tried. A decision that needs all results (that nothing
at a multiple fits, that nothing else is left) waits for them: the policy then proposes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autotune.core.candidate import Candidate
from autotune.core.options import Objective, SamplerName
from autotune.core.outcome import Failed
from autotune.core.stop import NOTHING_LEFT, Stop
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History
from autotune.estimate.throughput import FAR_ENOUGH, ArmView, Speeds, batch_of, speed_of
from autotune.space.levers import memory_class
from autotune.space.space import LARGEST_FREE_BATCH, Space

# First free batch where nothing is known: fits most models on most cards, and is not slow. A choice.
_FREE_START = 32
# Most trials of an arm at the same time before one of them shows whether the arm is worth it. A choice.
_MOST_UNKNOWN = 2


class Policy(Protocol):
    """Proposes candidates until it has seen enough."""

    @property
    def ending(self) -> Stop:
        """Why a search ends for which it has no proposal."""

    def next(self, history: History) -> Candidate | None:
        """Return the next candidate to run; ``None`` where none is worth it, or a running trial has to end first."""


class ThroughputPolicy:
    """Climbs each arm from a batch that is likely to fit to its best batch.

    Arms are taken by their predicted speed, those without a prediction in the space's order. A batch is not tried where
    another arm that is never slower was measured at it or at a larger one. A larger batch is tried only while it can
    still gain, a smaller one only next to the best of an arm that is not hopeless, and only if it is not predicted to
    be slower. Where nothing fits, the arms with what saves memory come next.
    """

    ending = NOTHING_LEFT

    def __init__(self, space: Space) -> None:
        self._space = space
        self._is_free = space.batches.effective_batch is None

    def next(self, history: History) -> Candidate | None:
        """See ``Policy.next``. Smaller multiples are searched only where nothing above fits."""
        for space in self._spaces(history):
            speeds, judge = Speeds(space, history), Judge(space, history)
            for multiple in space.batches.levels():
                ladder = space.batches.at_level(multiple)
                if ladder and not judge.fits_at(multiple):
                    smallest = [tried for tried in history.tried if batch_of(tried) == min(ladder)]
                    # Half the batch, which comes next, took 1.5 times as long for Qwen3-32B with QLoRA (H200).
                    if expanded := next(filter(None, map(judge.in_expandable_segments, smallest)), None):
                        return expanded
                for arm in speeds.in_order(ladder):
                    view = speeds.view(arm)
                    batch = None if view.doubtful or speeds.left_out(arm) else self._next_batch(speeds, view, ladder)
                    if batch is not None:
                        return space.candidate(arm, batch)
                if history.pending or judge.fits_at(multiple):
                    return None
        return Judge(self._space, history).last_resort()

    def _spaces(self, history: History) -> list[Space]:
        """Return the spaces in the order in which they are searched: what saves memory comes second.

        It comes first where it is predicted to fit and nothing without is, nor was measured to.
        """
        plain, saving, memory = self._space, self._space.saving, history.memory
        if saving is None:
            return [plain]
        if any(tried.candidate.arm in plain.arms for tried in history.believed()):
            return [plain, saving]

        def fits(space: Space) -> bool:
            batches = [batch for level in space.batches.levels() for batch in space.batches.at_level(level)]
            candidates = (space.candidate(arm, batch) for arm in space.arms for batch in batches)
            return memory is not None and any((told := memory.prediction(c)) and told.fits for c in candidates)

        return [saving, plain] if fits(saving) and not fits(plain) else [plain, saving]

    def _next_batch(self, speeds: Speeds, view: ArmView, ladder: Sequence[int]) -> int | None:
        rungs = [batch for batch in ladder if view.open(batch) and not speeds.is_beaten(view, batch)]
        if rungs and not any(view.was_chosen(tried) for tried in view.feasible.values()):
            return self._first_batch(view, rungs) if len(view.pending) < _MOST_UNKNOWN else None
        if not view.feasible:
            return None
        peak, top = view.fastest(), max(view.feasible)
        if speeds.can_gain(view):
            above = [batch for batch in rungs if batch > top and self._may_fit(view, batch, ladder)]
            larger = above[0] if above else self._between(speeds, view, top)
            if larger is not None:
                return larger
        below = [batch for batch in ladder if batch < peak][-1:]
        if not below or below[0] not in rungs or speeds.is_predicted_slower(view, below[0], peak):
            return None
        return None if speeds.is_hopeless(view, peak) else below[0]

    def _first_batch(self, view: ArmView, rungs: list[int]) -> int:
        """Return the best batch on other machines of this kind, else one near the best of arms that checkpoint alike.

        It is the middle one where neither is known. After a failure, which may depend on the batch, it is halfway
        between that batch and the smallest.
        """
        smaller = [batch for batch in rungs if view.failed and batch < min(view.failed)]
        if smaller:
            return smaller[len(smaller) // 2]
        elsewhere = view.history.elsewhere
        measured = [batch for batch in rungs if self._space.candidate(view.arm, batch) in elsewhere]
        if measured:
            return max(measured, key=lambda batch: elsewhere[self._space.candidate(view.arm, batch)])
        fitting = view.predicted_to_fit(rungs)
        if fitting and not self._is_free:
            return self._fastest_predicted(view, fitting)
        recomputes = view.arm.gradient_checkpointing
        like = [
            tried
            for tried in view.history.believed()
            if tried.candidate.arm.gradient_checkpointing == recomputes and view.was_chosen(tried)
        ]
        middle = _FREE_START if self._is_free else rungs[len(rungs) // 2]
        start = batch_of(max(like, key=speed_of)) if like else middle
        return min(rungs, key=lambda batch: max(batch / start, start / batch))

    def _fastest_predicted(self, view: ArmView, fitting: Sequence[int]) -> int:
        """Return the batch with the highest predicted speed; the largest where no speed is predicted."""
        steps = view.history.steps

        def key(batch: int) -> tuple[float, int]:
            speed = steps.samples_per_second(self._space.candidate(view.arm, batch)) if steps is not None else None
            return speed or 0.0, batch

        return max(fitting, key=key)

    def _may_fit(self, view: ArmView, batch: int, ladder: Sequence[int]) -> bool:
        """Return whether a batch may fit, given the smallest one that did not.

        Only a batch without accumulation can need less memory than a smaller one, so larger ones are not tried.
        """
        over = [b for b, tried in view.tried.items() if view.history.is_over(tried) and b < batch]
        if not over:
            return True
        following = min(rung for rung in ladder if rung > min(over))
        return batch <= max(following, 2 * min(over))

    def _between(self, speeds: Speeds, view: ArmView, peak: int) -> int | None:
        """Return a free batch about halfway to the smallest one that is ruled out.

        ``None`` where that is less than an eighth away.

        Ruled out means known or predicted not to fit, or failed. Out of the host's memory rules nothing out.
        """
        if not self._is_free:
            return None
        multiple = self._space.batches.levels()[0]
        ladder = [batch for batch in self._space.batches.at_level(multiple) if batch > peak]
        of_host = {batch for batch in view.failed if not isinstance(view.tried[batch].outcome, Failed)}
        limits = [batch for batch in ladder if not view.open(batch) and batch not in of_host]
        limits += [batch for batch in view.failed - of_host if batch > peak]
        over = view.history.smallest_over(view.arm, accumulates=False)
        limits += [over] if over is not None else []
        if not limits:
            return None
        limit = min(*limits, self._space.batches.most + 1)
        if (limit - peak) * 8 <= peak:
            return None
        middle = (peak + limit) // 2 // multiple * multiple
        # A failed batch says nothing about its neighbours.
        near = (middle + away * multiple for away in (0, -1, 1, -2, 2))
        inside = [batch for batch in near if peak < batch < limit and view.open(batch)]
        return next((batch for batch in inside if not speeds.is_beaten(view, batch)), None)


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
                view = ArmView(self._space, arm, history)
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

    def _next_batch(self, view: ArmView, multiple: int) -> int | None:
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

    def _aim(self, view: ArmView, multiple: int, fits: int, over: int | None) -> int:
        """Return the batch at which the line through two measured peaks meets the ceiling's line."""
        peaks: dict[int, int] = {
            b: t.measurement.judged_bytes(view.arm) for b, t in view.tried.items() if t.measurement
        }
        far = [b for b in peaks if b <= FAR_ENOUGH * fits]
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
    return MaxBatchPolicy(space) if objective == "max-batch" else ThroughputPolicy(space)
