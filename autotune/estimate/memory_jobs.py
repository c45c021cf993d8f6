"""Run memory predictions as jobs beside the trials, a few at a time, and file the answers in memory models."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autotune.core.candidate import Arm
from autotune.core.ceiling import Ceiling
from autotune.core.chip import Chip
from autotune.core.messages import Answer
from autotune.core.prediction import PredictionAnswer, PredictionWork, TracedStep
from autotune.core.schema import decode
from autotune.estimate.memory import MemoryModel, Question
from autotune.space.levers import arm_that_computes, predicted_from, prediction_class

# Tracing a large model twice took 3 s on an idle core. Sixty times that is no normal delay, even on a busy machine.
_TIMEOUT_SECONDS = 180.0


class Submitter(Protocol):
    """Runs jobs beside the trials."""

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start a job without waiting for it."""

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return the answers of submitted jobs that ended since the last call, by job id."""


class OwnTraces:
    """Submits predictions of the user's own code with the traces that its inspection has made."""

    def __init__(self, submitter: Submitter, traces: Sequence[TracedStep]) -> None:
        self._submitter = submitter
        self._steps = {_allocating(trace.arm): trace.step for trace in traces}

    def has(self, arm: Arm) -> bool:
        """Return whether a step of an arm was traced."""
        return _allocating(arm) in self._steps

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start a job without waiting for it."""
        traced = dataclasses.replace(work, step=self._steps[_allocating(work.arm)])
        self._submitter.submit(job_id, traced, timeout_seconds)

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return the answers of submitted jobs that ended since the last call, by job id."""
        return self._submitter.ended(wait_seconds)


def _allocating(arm: Arm) -> Arm:
    """Return the arm that represents those whose steps allocate the same, in however many processes."""
    return prediction_class(dataclasses.replace(arm, strategy=None, ranks=1, ddp_find_unused_parameters=None))


class Kept(Protocol):
    """Stores earlier predictions; see ``autotune.tuning.answer_cache``."""

    def find(self, identity: PredictionWork) -> PredictionAnswer | None:
        """Return the stored answer to a ``Question.identity``; ``None`` where there is none."""

    def keep(self, identity: PredictionWork, answer: PredictionAnswer) -> None:
        """Store an answer."""


@dataclass(frozen=True)
class Target:
    """A GPU that memory is predicted for, with the questions about it."""

    chip: Chip
    ceiling: Ceiling
    questions: Sequence[Question]
    layers: int | None = None
    """How many layers of the model can recompute their activations."""
    reserve: Sequence[Question] = ()
    """Questions that are only asked where nothing else is predicted to fit, or a trial is about them."""


@dataclass
class _Inquiry:
    """A question as it is sent to the trial server, with every memory model that waits for its answer."""

    work: PredictionWork
    identity: PredictionWork
    askers: list[tuple[MemoryModel, Question]] = field(default_factory=list)

    def is_about(self, arm: Arm) -> bool:
        """Return whether the answer says what an arm needs."""
        needed = {prediction_class(each) for each in (*predicted_from(arm), arm_that_computes(arm))}
        return any(prediction_class(question.arm) in needed for _, question in self.askers)


class Forecast:
    """Has memory predicted for one or more GPUs: sends each question once, and files the answer in each GPU's model.

    A search starts with a few questions and sends others when it needs them; ``complete`` sends them all. No caller
    waits longer than ``patience_seconds`` in total. Answers that come later still count.
    """

    def __init__(
        self,
        submitter: Submitter,
        targets: Sequence[Target],
        *,
        parallel: int,
        kept: Kept | None = None,
        patience_seconds: float = math.inf,
        asks_ahead: bool = False,
    ) -> None:
        self.models = [MemoryModel(target.ceiling, target.layers) for target in targets]
        self._submitter = submitter
        self._kept = kept
        self._waiting = _inquiries([(target, target.questions) for target in targets], self.models)
        self._reserve = _inquiries([(target, target.reserve) for target in targets], self.models)
        self._asked: dict[str, _Inquiry] = {}
        self._parallel = max(1, parallel)
        self._patience_seconds = patience_seconds
        self._asks_ahead = asks_ahead
        """Whether a caller that waits for one arm has the next questions answered meanwhile."""
        self._number = 0
        self._to_keep: list[tuple[PredictionWork, PredictionAnswer]] = []
        self.unanswered: list[Question] = []
        """Questions whose process failed. Nothing is predicted there, and the search goes on without."""
        self._recall()

    @property
    def model(self) -> MemoryModel:
        """The memory model of the first GPU."""
        return self.models[0]

    @property
    def is_complete(self) -> bool:
        """Whether every question was answered or given up, also of those in reserve."""
        return self.is_answered and not self._reserve

    @property
    def is_answered(self) -> bool:
        """Whether every question was answered or given up, but for those in reserve."""
        return not self._waiting and not self._asked

    def begin(self, arm: Arm | None) -> None:
        """Send the questions about an arm, and others as far as they may run at once, without waiting for the answers.

        Does nothing where the arm's answers are there already. ``None`` stands for any arm.
        """
        if arm is not None:
            if self.is_settled(arm):
                return
            self._ask_about(arm)
        self._fill()

    def settle(self, upcoming: Callable[[], Arm | None]) -> None:
        """Wait until the answers about the ``upcoming`` arm are there and no other question is being answered.

        An answer may change which arm is the upcoming one, so that is asked again after each. Where nothing is
        predicted to fit, all other questions are asked, and then those in reserve.
        """
        self._settle(upcoming)
        while self._patience_seconds > 0 and (self._waiting or self._reserve) and not self.model.expects_a_fit():
            if self._waiting:
                self.complete()
            else:
                self.call_on_reserve()
            self._settle(upcoming)

    def _settle(self, upcoming: Callable[[], Arm | None]) -> None:
        while (arm := upcoming()) is not None and not self.is_settled(arm):
            if self._ask_about(arm) and self._asks_ahead:
                self._fill()
            if self._patience_seconds <= 0:
                return
            self._wait()
            self._keep()

    def complete(self) -> None:
        """Send all questions and wait for the answers."""
        self._take(0.0)
        self._fill()
        self._keep()
        while self._asked and self._patience_seconds > 0:
            self._wait()
            # Storing takes time, a second where there is no database yet. The next questions are sent before.
            self._fill()
            self._keep()

    def call_on_reserve(self) -> None:
        """Send the questions in reserve, and wait for the answers."""
        self._waiting, self._reserve = [*self._waiting, *self._reserve], []
        self.complete()

    def is_settled(self, arm: Arm) -> bool:
        """Return whether all that will be predicted of an arm is known, and nothing is being predicted."""
        self._take(0.0)
        self._keep()
        return not self._asked and not any(inquiry.is_about(arm) for inquiry in (*self._waiting, *self._reserve))

    def _wait(self) -> None:
        """For one answer, a second at most."""
        began = time.monotonic()
        self._take(min(1.0, self._patience_seconds))
        self._patience_seconds -= time.monotonic() - began

    def _ask_about(self, arm: Arm) -> bool:
        """Send the questions about an arm; return whether there were any."""
        about = [inquiry for inquiry in (*self._waiting, *self._reserve) if inquiry.is_about(arm)]
        self._waiting, self._reserve = (
            [inquiry for inquiry in among if inquiry not in about] for among in (self._waiting, self._reserve)
        )
        for inquiry in about:
            self._ask(inquiry)
        return bool(about)

    def _fill(self) -> None:
        """Ask in order, as many questions as may be asked at once."""
        while self._waiting and len(self._asked) < self._parallel:
            self._ask(self._waiting.pop(0))

    def _keep(self) -> None:
        """Store what was filed since the last time."""
        answered, self._to_keep = self._to_keep, []
        if self._kept is not None:
            for identity, answer in answered:
                self._kept.keep(identity, answer)

    def _take(self, wait_seconds: float) -> None:
        """File what has been answered; waits at most so long for one answer."""
        if not self._asked:
            return
        for job_id, answer in self._submitter.ended(wait_seconds).items():
            inquiry = self._asked.pop(job_id, None)
            if inquiry is None:
                continue
            predicted = _predicted(answer)
            if predicted is None:
                for model, question in inquiry.askers:
                    model.miss(question, _why_unanswered(answer))
                    self.unanswered.append(question)
                continue
            _file(inquiry, predicted)
            self._to_keep.append((inquiry.identity, predicted))

    def _ask(self, inquiry: _Inquiry) -> None:
        self._number += 1
        job_id = f"predict-{self._number}"
        self._asked[job_id] = inquiry
        self._submitter.submit(job_id, inquiry.work, _TIMEOUT_SECONDS)

    def _recall(self) -> None:
        """File what was predicted before."""
        self._waiting, self._reserve = (
            [inquiry for inquiry in among if not self._is_kept(inquiry)] for among in (self._waiting, self._reserve)
        )

    def _is_kept(self, inquiry: _Inquiry) -> bool:
        prediction = self._kept.find(inquiry.identity) if self._kept is not None else None
        if prediction is not None:
            _file(inquiry, prediction)
        return prediction is not None


def _inquiries(asked: Sequence[tuple[Target, Sequence[Question]]], models: Sequence[MemoryModel]) -> list[_Inquiry]:
    """Every question once, in order: GPUs that differ in nothing that matters share theirs."""
    inquiries: dict[PredictionWork, _Inquiry] = {}
    for (target, questions), model in zip(asked, models, strict=True):
        for question in questions:
            work = question.work(target.chip, target.ceiling)
            identity = question.identity(target.chip, target.ceiling)
            inquiry = inquiries.setdefault(identity, _Inquiry(work, identity))
            inquiry.askers.append((model, question))
    return list(inquiries.values())


def _predicted(answer: Answer) -> PredictionAnswer | None:
    """Return what a job predicted; ``None`` where its process failed or wrote something else."""
    try:
        return None if answer.result is None else decode(answer.result, PredictionAnswer)
    except ValueError:
        return None


def _why_unanswered(answer: Answer) -> str:
    """Return why a job predicted nothing, in words."""
    if answer.timed_out or answer.overdue:
        return f"tracing a step took longer than {_TIMEOUT_SECONDS:.0f} s"
    words = answer.last_words[:200].rstrip(".")
    return f"tracing a step failed: {words}" if words else "tracing a step failed"


def _file(inquiry: _Inquiry, answer: PredictionAnswer) -> None:
    for model, question in inquiry.askers:
        model.add(question, answer)
