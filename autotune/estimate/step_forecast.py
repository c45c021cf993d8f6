"""Predict step times of candidates from the operations that a trace of their step has."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.candidate import Candidate
from autotune.core.chip import Chip
from autotune.estimate.memory import MemoryModel
from autotune.estimate.step_time import StepTime, StepTimeModel


class StepForecast:
    """Predicted step times of candidates, each computed once."""

    def __init__(self, memory: MemoryModel, chip: Chip) -> None:
        self._memory = memory
        self._model = StepTimeModel(chip)
        self._known: dict[Candidate, StepTime] = {}

    def predicted(self, candidate: Candidate) -> StepTime | None:
        """Return the predicted step of a candidate; ``None`` where its operations are not known, or not yet."""
        if candidate not in self._known:
            operations = self._memory.operations(candidate.arm)
            if operations is None or not self._model.knows(candidate.arm):
                return None
            self._known[candidate] = self._model.predict(operations, candidate)
        return self._known[candidate]

    def known(self) -> Iterable[StepTime]:
        """Return the steps that were predicted."""
        return self._known.values()
