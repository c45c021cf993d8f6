"""Use predicted step times in a search: where to begin, and what is not worth a trial on this machine."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.candidate import Candidate
from autotune.devices.gpus import Chip
from autotune.estimate.memory import MemoryModel
from autotune.estimate.step_time import StepTime, StepTimeModel

_FEWEST_CHECKS = 1
"""Measured candidates that must lie in their predicted intervals before a prediction leaves anything out."""
_SURELY_SLOWER = 0.97
"""A batch predicted to reach less than this share of another one of its arm is not tried beside it. Errors of the two
are much the same, and cancel."""


class StepForecast:
    """Predicted step times of candidates, and whether they held for those that were measured."""

    def __init__(self, memory: MemoryModel, chip: Chip) -> None:
        self._memory = memory
        self._model = StepTimeModel(chip)
        self._known: dict[Candidate, StepTime] = {}

    def step(self, candidate: Candidate) -> StepTime | None:
        """Return the predicted step of a candidate; ``None`` where its operations are not known, or not yet."""
        if candidate not in self._known:
            operations = self._memory.operations(candidate.arm)
            if operations is None:
                return None
            self._known[candidate] = self._model.predict(operations, candidate)
        return self._known[candidate]

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
            step = self.step(candidate)
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
