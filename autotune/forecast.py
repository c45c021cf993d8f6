"""Having memory predicted in processes of their own, a few at a time, without waiting for them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

from autotune.device import Ceiling
from autotune.device.chips import Chip
from autotune.memory import MemoryModel, Question
from autotune.trial import Document

# Two traces of a large model took 3 s on an idle core; ten times that on a busy machine is still no hang.
_TIMEOUT_SECONDS = 180.0


class Submitter(Protocol):
    """Who runs jobs beside the trials."""

    def submit(self, job_id: str, kind: str, details: Document, timeout_seconds: float) -> None:
        """Start a job and do not wait."""

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Document]:
        """Submitted jobs that have ended since the last call."""


class Forecast:
    """Asks the questions in order and files the answers in ``model``."""

    def __init__(
        self, submitter: Submitter, questions: Sequence[Question], chip: Chip, ceiling: Ceiling, *, parallel: int
    ) -> None:
        self.model = MemoryModel(ceiling)
        self._submitter = submitter
        self._waiting = list(questions)
        self._asked: dict[str, Question] = {}
        self._chip = chip
        self._ceiling = ceiling
        self._parallel = max(1, parallel)
        self._number = 0
        self.unanswered: list[Question] = []
        """Questions whose process failed: nothing is predicted there, and the search does without."""

    @property
    def is_complete(self) -> bool:
        """Whether every question has been answered or given up."""
        return not self._waiting and not self._asked

    def advance(self, wait_seconds: float = 0.0) -> None:
        """File what has been answered and ask what comes next; waits at most so long for one answer."""
        self._ask()
        if not self._asked:
            return
        for job_id, answer in self._submitter.ended(wait_seconds).items():
            question = self._asked.pop(job_id, None)
            if question is None:
                continue
            if "result" in answer:
                self.model.add(question, answer["result"])
            else:
                self.unanswered.append(question)
        self._ask()

    def complete(self, seconds: float = math.inf) -> None:
        """Wait for every answer, at most so long."""
        deadline = time.monotonic() + seconds
        while not self.is_complete and (left := deadline - time.monotonic()) > 0:
            self.advance(wait_seconds=min(1.0, left))

    def _ask(self) -> None:
        while self._waiting and len(self._asked) < self._parallel:
            question = self._waiting.pop(0)
            self._number += 1
            job_id = f"predict-{self._number}"
            self._asked[job_id] = question
            details = question.details(self._chip, self._ceiling)
            self._submitter.submit(job_id, "predict", details, _TIMEOUT_SECONDS)
