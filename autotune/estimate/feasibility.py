"""Decide which candidates may be tried now. What memory rules out is decided by ``Chances.rules_out``.

Every policy asks this module, also the one that passes on what Optuna's samplers propose.

What a trial rules out depends on how it ended. Out of memory on the device rules out that batch and larger ones, in
every arm that needs at least as much memory. Out of host memory, or an error, rules out the candidate alone. An arm
that failed at several batches and completed at none hardly runs at another: these wait until nothing else is left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune.core.candidate import Arm, Candidate
from autotune.estimate.chance import LEAST_CHANCE, Chances
from autotune.estimate.history import History
from autotune.estimate.memory import LEAST_EXPANDABLE_EXCESS
from autotune.estimate.pooling import Tried, replays_graphs
from autotune.space.arms import changed
from autotune.space.space import Space


class Judge:
    """Decides which candidates (arms with a batch) may be tried, given the space and the history as it is now."""

    def __init__(self, space: Space, history: History) -> None:
        self._space, self._history = space, history

    @functools.cached_property
    def chances(self) -> Chances:
        """The probabilities that candidates run and fit."""
        return Chances(self._history)

    def is_open(self, candidate: Candidate) -> bool:
        """Return whether a candidate is new, and ruled out by no trial or prediction."""
        return self.is_new(candidate) and not self.chances.rules_out(candidate)

    def is_new(self, candidate: Candidate) -> bool:
        """Return whether a candidate was not tried, is not under way, and does nothing that memory does not require.

        Without need it must neither reduce gradients in each micro-step nor offload the optimizer state.
        """
        is_known = bool(self._history.outcomes_of(candidate)) or candidate in self._history.pending
        return not (is_known or self._syncs_needlessly(candidate) or self.offloads_needlessly(candidate))

    def offloads_needlessly(self, candidate: Candidate) -> bool:
        """Return whether a candidate keeps its optimizer state on the host although an arm without this may fit.

        The CPU's update and the copies over PCIe cost seconds a step.
        """
        if not candidate.arm.offloads_optimizer:
            return False
        others = [arm for arm in self._space.arms if not arm.offloads_optimizer]
        fitting = (t.candidate for t in self._history.believed() if not t.candidate.arm.offloads_optimizer)
        if any(map(self._space.contains, fitting)):
            return True
        return any(self._may_fit_at(multiple, others) for multiple in self._space.batches.levels())

    def _syncs_needlessly(self, candidate: Candidate) -> bool:
        """Return whether a candidate reduces gradients in each micro-step although memory does not require this.

        That costs communication. It is worth a trial only where keeping whole gradients while accumulating does not
        fit.
        """
        plain = replace(candidate, arm=replace(candidate.arm, sync_each_batch=False))
        if not candidate.arm.sync_each_batch or not self._space.contains(plain):
            return False
        return not (candidate.accumulates and self.chances.rules_out(plain))

    def in_expandable_segments(self, tried: Tried) -> Candidate | None:
        """Return the candidate with expandable segments, for a trial that was over the line by fragmentation alone.

        ``None`` where that candidate is not open, or where it cannot help: the trial gave no peak, too much was
        allocated, or CUDA graphs keep the memory that they reserved.
        """
        arm, measured = tried.candidate.arm, tried.measurement
        if arm.expandable_segments or "expandable_segments" not in self._space.late or replays_graphs(arm):
            return None
        if measured is None or not self._history.is_over(tried):
            return None
        least_bytes = math.ceil(measured.peak_allocated_bytes * (1 + LEAST_EXPANDABLE_EXCESS))
        if not self._history.ceiling.bounds.fits(least_bytes):
            return None
        candidate = replace(tried.candidate, arm=changed(arm, expandable_segments=True))
        return candidate if self.is_open(candidate) and self._space.contains(candidate) else None

    def fits_at(self, multiple: int) -> bool:
        """Return whether a batch divisible by ``multiple`` fits, so that no smaller multiple needs a search.

        Only candidates of the space count. The baseline may have a batch outside of it. What fits only because it saves
        memory belongs to ``Space.saving``.
        """
        return any(
            self._space.contains(tried.candidate)
            and self._space.has_arm(tried.candidate.arm)
            and tried.candidate.per_device_train_batch_size % multiple == 0
            for tried in self._history.believed()
        )

    def batches_in_reach(self) -> list[int]:
        """Return the batches to search now: of smaller multiples only while no batch of a larger multiple may fit."""
        reachable: list[int] = []
        batches = self._space.batches
        for multiple in batches.levels():
            reachable += batches.at_level(multiple)
            if self.fits_at(multiple) or self._may_fit_at(multiple):
                break
        return sorted(reachable)

    def _may_fit_at(self, multiple: int, arms: Sequence[Arm] | None = None) -> bool:
        """Return whether a candidate with a batch at this multiple is under way, or is open and may run."""
        return any(
            candidate in self._history.pending
            or (self.is_open(candidate) and self.chances.runs(candidate) > LEAST_CHANCE)
            for candidate in self.candidates_at(multiple, arms)
        )

    def candidates_at(self, multiple: int, arms: Sequence[Arm] | None = None) -> Iterator[Candidate]:
        """Yield the candidates of some arms, by default of all, with each batch at this multiple."""
        for arm in self._space.arms if arms is None else arms:
            for batch in self._space.batches.at_level(multiple):
                yield self._space.candidate(arm, batch)

    def last_resort(self) -> Candidate | None:
        """Return the next candidate to try where nothing has fitted yet, with the smallest batch first.

        Left to try are then candidates that only a prediction rules out, and batches smaller than those that failed.
        Returns ``None`` where a candidate fits, or where trials show that none does.
        """
        if any(self._space.contains(tried.candidate) for tried in self._history.believed()):
            return None
        left = [
            candidate
            for multiple in self._space.batches.levels()
            for candidate in self.candidates_at(multiple)
            if not (self._syncs_needlessly(candidate) or self.offloads_needlessly(candidate))
            and not self._history.outcomes_of(candidate)
            and self._history.ruled_out_by(candidate) is None
            and candidate.per_device_train_batch_size < self.chances.failed_from(candidate.arm)
        ]
        return min(left, key=lambda c: (c.per_device_train_batch_size, not c.arm.gradient_checkpointing), default=None)

    def is_in_turn(self, candidate: Candidate) -> bool:
        """Return whether a candidate proposed by an Optuna sampler, which knows no rule of this module, may run now.

        A batch at a smaller multiple has to wait while a batch at a larger multiple may fit.
        """
        level = self._space.batches.level(candidate.per_device_train_batch_size)
        larger = [multiple for multiple in self._space.batches.levels() if multiple > level]
        return self.is_open(candidate) and not any(self.fits_at(each) or self._may_fit_at(each) for each in larger)
