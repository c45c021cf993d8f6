"""Use predicted step times in a search: where to begin, and what is not worth a trial on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.chip import Chip
from autotune.estimate.memory import MemoryModel
from autotune.estimate.step_time import StepTime, StepTimeModel

_FEWEST_CHECKS = 1
"""Measured candidates that must lie in their predicted intervals before a prediction leaves anything out."""
_SURELY_SLOWER = 0.97
"""A batch predicted to reach less than this share of another one of its arm is not tried beside it. Errors of the two
are much the same, and cancel."""

# Factors that hold 95 of 100 step times after a measured step corrected them (docs/explanation/speed.md). Limited by
# the GPU, on the H200: 428 pairs of steps of one arm, 1,014 of one precision. On other GPUs: 166 pairs of published
# throughputs of one GPU, source and precision. Limited by the host: 86 pairs of one arm, 638 in all.
_OF_ARM, _OF_PRECISION, _OF_OTHER_CHIPS, _OF_HOST = 1.07, 1.09, 1.4, 1.42
_FITTED_CHIP = "h200"


class StepForecast:
    """Predicted step times of candidates, corrected by those that were measured, and whether they held for those."""

    def __init__(self, memory: MemoryModel, chip: Chip) -> None:
        self._memory = memory
        self._model = StepTimeModel(chip)
        self._is_fitted = chip.name.lower() == _FITTED_CHIP
        self._known: dict[Candidate, StepTime] = {}
        self._ratios: dict[Candidate, float] = {}

    def learn(self, candidate: Candidate, samples_per_second: float) -> None:
        """Correct predictions of similar steps by a measured one; the last measurement of a candidate counts."""
        step = self.predicted(candidate)
        if step is not None and samples_per_second > 0:
            self._ratios[candidate] = step.samples_per_second / samples_per_second

    def predicted(self, candidate: Candidate) -> StepTime | None:
        """Return the predicted step of a candidate before any correction.

        ``None`` where its operations are not known, or not yet.
        """
        if candidate not in self._known:
            operations = self._memory.operations(candidate.arm)
            if operations is None or not self._model.knows(candidate.arm):
                return None
            self._known[candidate] = self._model.predict(operations, candidate)
        return self._known[candidate]

    def known(self) -> Iterable[StepTime]:
        """Return the steps that were predicted."""
        return self._known.values()

    def step(self, candidate: Candidate) -> StepTime | None:
        """Return the predicted step of a candidate, corrected by measured steps of its arm, or of its precision."""
        step = self.predicted(candidate)
        if step is None or not self._ratios:
            return step
        factor, spread = self._correction(step)
        if factor is None:
            return step
        seconds = step.seconds * factor
        low, high = (end * factor for end in step.interval_seconds)
        interval = max(low, seconds / spread), min(high, seconds * spread)
        return replace(step, seconds=seconds, interval_seconds=interval)

    def _correction(self, step: StepTime) -> tuple[float | None, float]:
        """Return the factor for a step and what it leaves open; ``None`` where nothing alike was measured.

        Steps are alike that the GPU limits, or that the host does, of ranks that share the model in the same way.
        """
        arm, waits = step.candidate.arm, step.limited_by == "host"
        alike = [
            (candidate.arm, ratio)
            for candidate, ratio in self._ratios.items()
            if (known := self.predicted(candidate)) is not None
            and (known.limited_by == "host") == waits
            and candidate.arm.strategy == arm.strategy
        ]
        of_arm = [ratio for other, ratio in alike if other == arm]
        of_precision = [ratio for other, ratio in alike if other.precision == arm.precision]
        every = [ratio for _, ratio in alike] if waits else []
        ratios = of_arm or of_precision or every
        if not ratios:
            return None, 1.0
        if waits or arm.ranks > 1:
            # Of several ranks too few steps were recorded to know better.
            spread = _OF_HOST
        elif not self._is_fitted:
            spread = _OF_OTHER_CHIPS
        else:
            spread = _OF_ARM if of_arm else _OF_PRECISION
        return statistics.median(ratios), spread

    def samples_per_second(self, candidate: Candidate) -> float | None:
        """Return the predicted speed of a candidate."""
        step = self.step(candidate)
        return step.samples_per_second if step is not None else None

    def most(self, candidates: Iterable[Candidate]) -> float | None:
        """Return the upper end of the fastest interval; ``None`` where one of the candidates has no prediction."""
        most = 0.0
        for candidate in candidates:
            step = self.step(candidate)
            if step is None:
                return None
            most = max(most, step.interval_samples_per_second[1])
        return most

    def has_held(self, measured: Iterable[tuple[Candidate, float]]) -> bool:
        """Return whether the samples a second of several candidates were measured, and all in their intervals."""
        checks = 0
        for candidate, samples_per_second in measured:
            step = self.predicted(candidate)
            if step is None:
                continue
            low, high = step.interval_samples_per_second
            if not low <= samples_per_second <= high:
                return False
            checks += 1
        return checks >= _FEWEST_CHECKS

    def is_surely_slower(self, candidate: Candidate, than: Candidate) -> bool:
        """Return whether another batch of an arm is predicted to be so much slower that it is not worth a trial."""
        one, other = self.samples_per_second(candidate), self.samples_per_second(than)
        return one is not None and other is not None and one < _SURELY_SLOWER * other
