"""Predict the memory of a search's candidates: jobs of worker processes answer what the store has no answer to.

What a trial depends on is predicted before it. No prediction runs beside a trial, unless that is the baseline.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from autotune.core.candidate import OWN_OPTIM, Arm
from autotune.core.ceiling import Ceiling
from autotune.core.device import Chip
from autotune.core.messages import Answer
from autotune.core.options import OPTUNA_SAMPLERS
from autotune.core.prediction import ArmsToTrace, PredictionAnswer, PredictionWork
from autotune.core.schema import decode
from autotune.core.units import GIB
from autotune.devices.host import host_memory
from autotune.estimate.memory import MemoryModel, Question, questions
from autotune.space.arms import arm_that_computes, predicted_from, prediction_class, why_unpredictable
from autotune.tuning.answer_cache import KeptPredictions
from autotune.tuning.prepare import Prepared
from autotune.tuning.request import SearchRequest

if TYPE_CHECKING:
    from autotune.tuning.plan import Plan

# Tracing a large model twice took 3 s on an idle core. Sixty times that is no normal delay, even on a busy machine.
_TIMEOUT_SECONDS = 180.0
# A prediction takes a core for a few seconds, and about 1 GiB of host memory.
_MOST_PARALLEL = 8
# Of several ranks there are 20 questions for a model with checkpointing, of 2 to 10 s of a core each (Llama-3.2-1B).
_MOST_PARALLEL_OF_RANKS = 16
_PREDICTION_BYTES = GIB
# Trials of image models that were timed beside predictions were wrong by 10 % and more, so a search waits for
# predictions there, in total no longer than this.
_PATIENCE_SECONDS = 20.0
# That limit for several ranks, whose strategies make more and slower predictions, and for models that are large for the
# memory, of which most candidates do not fit. With 20 s a search of Llama-3.2-1B on two H200 tried candidates before
# they were predicted: 12 of 17 ran out of memory, and it took 96 s.
_LONG_PATIENCE_SECONDS = 60.0
# Free batches double from 8; no GPU has memory for more doublings than this.
_MOST_RUNGS = 12


class Submitter(Protocol):
    """Runs prediction jobs in processes of their own; the ``TrialServer`` is one."""

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        """Start a job without waiting for it."""

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        """Return the answers of submitted jobs that ended since the last call, by job id."""


@dataclass(frozen=True)
class Target:
    """A GPU that memory is predicted for, with the questions about it: each is about an arm at a few batches."""

    chip: Chip
    ceiling: Ceiling
    questions: Sequence[Question]
    layers: int | None = None
    """How many layers of the model can recompute their activations."""
    reserve: Sequence[Question] = ()
    """Questions that are only asked where nothing else is predicted to fit, or a trial is about them."""
    traced: Mapping[Arm, str] = field(default_factory=dict)
    """For the user's own code: the packed traces of its inspection, by the ``_allocation_class`` of their arms."""


@dataclass
class _Inquiry:
    """A question as it is sent to the trial server, with every memory model that waits for its answer."""

    work: PredictionWork
    identity: PredictionWork
    """The key of its answer in the cache."""
    in_reserve: bool
    """Whether it is only asked where nothing else is predicted to fit."""
    askers: list[tuple[MemoryModel, Question]] = field(default_factory=list)

    def is_about(self, arm: Arm) -> bool:
        """Return whether this question's answer is part of an arm's prediction."""
        # Arms of one class have equal predictions. Operations may be counted in another arm than memory.
        needed = {prediction_class(each) for each in (*predicted_from(arm), arm_that_computes(arm))}
        return any(prediction_class(question.arm) in needed for _, question in self.askers)

    def file(self, answer: PredictionAnswer) -> None:
        """Add the answer to each memory model that waits for it."""
        for model, question in self.askers:
            model.add(question, answer)


class Forecast:
    """Has memory predicted for one or more GPUs: sends each question once, and files the answer in each GPU's model.

    Questions whose answers are cached are never sent. A search starts with a few questions and sends others when it
    needs them; ``complete`` sends all but the reserve. All callers together wait for ``patience_seconds`` at most.
    Answers that come later still count. Without a ``submitter``, cached answers are all that is known.
    """

    def __init__(
        self,
        submitter: Submitter | None,
        targets: Sequence[Target],
        *,
        parallel: int,
        kept: KeptPredictions | None = None,
        patience_seconds: float = math.inf,
        asks_ahead: bool = False,
    ) -> None:
        """Look up answers in the cache ``kept``, and queue the other questions. At most ``parallel`` jobs run at once.

        ``asks_ahead``: while a caller waits for one arm, the next questions are answered too.
        """
        self.models = [MemoryModel(target.ceiling, target.layers) for target in targets]
        self._submitter, self._kept = submitter, kept
        self._waiting: list[_Inquiry] = []
        for inquiry in _inquiries(targets, self.models):
            known = kept.find(inquiry.identity) if kept is not None else None
            if known is None:
                self._waiting.append(inquiry)
            else:
                inquiry.file(known)
        self._asked: dict[str, _Inquiry] = {}
        self._parallel = max(1, parallel)
        self._patience_seconds, self._asks_ahead, self._last_number = patience_seconds, asks_ahead, 0
        self._to_store: list[tuple[PredictionWork, PredictionAnswer]] = []
        self.unanswered: list[Question] = []
        """Questions whose process failed. The search goes on without these predictions."""

    @property
    def model(self) -> MemoryModel:
        """The memory model of the first GPU."""
        return self.models[0]

    @property
    def is_complete(self) -> bool:
        """Whether every question was answered or given up, including the reserve."""
        return not self._waiting and not self._asked

    @property
    def is_answered(self) -> bool:
        """Whether every question was answered or given up, except for the reserve."""
        return not self._asked and all(inquiry.in_reserve for inquiry in self._waiting)

    def begin(self, arm: Arm | None) -> None:
        """Start the prediction jobs of an arm, then others up to the limit, without waiting for answers.

        Does nothing where the arm has its answers. With ``None`` only the others are started.
        """
        if arm is not None:
            if self.is_settled(arm):
                return
            self._ask_about(arm)
        self._start_jobs()

    def settle(self, upcoming: Callable[[], Arm | None]) -> None:
        """Wait until the arm that ``upcoming`` returns has its answers and no job runs, or patience is exhausted.

        An answer may change which arm is tried next, so ``upcoming`` is called again after each; ``None`` ends the
        wait. Where nothing is predicted to fit, all other questions follow, and then the reserve.
        """
        self._wait_for_upcoming(upcoming)
        while self._patience_seconds > 0 and self._waiting and not self.model.expects_a_fit():
            if all(inquiry.in_reserve for inquiry in self._waiting):
                self.call_on_reserve()
            else:
                self.complete()
            self._wait_for_upcoming(upcoming)

    def _wait_for_upcoming(self, upcoming: Callable[[], Arm | None]) -> None:
        """Ask about the upcoming arm until its answers are complete or patience is exhausted."""
        while (arm := upcoming()) is not None and not self.is_settled(arm):
            if self._ask_about(arm) and self._asks_ahead:
                self._start_jobs()
            if self._patience_seconds <= 0:
                return
            self._wait_for_answer()
            self._store_answers()

    def complete(self) -> None:
        """Start the jobs of all questions except the reserve, and wait for the answers."""
        self._collect_answers(0.0)
        self._start_jobs()
        self._store_answers()
        while self._asked and self._patience_seconds > 0:
            self._wait_for_answer()
            # Storing takes time, a second where there is no database yet. The next questions are sent before.
            self._start_jobs()
            self._store_answers()

    def call_on_reserve(self) -> None:
        """Start the jobs of all questions, with those in reserve, and wait for the answers."""
        for inquiry in self._waiting:
            inquiry.in_reserve = False
        self.complete()

    def is_settled(self, arm: Arm) -> bool:
        """Collect finished jobs; return whether no job is running and no question about this arm is waiting."""
        self._collect_answers(0.0)
        self._store_answers()
        return not self._asked and not any(inquiry.is_about(arm) for inquiry in self._waiting)

    def _wait_for_answer(self) -> None:
        """Wait for one answer, at most a second."""
        began_at = time.monotonic()
        self._collect_answers(min(1.0, self._patience_seconds))
        self._patience_seconds -= time.monotonic() - began_at

    def _ask_about(self, arm: Arm) -> bool:
        """Start the jobs of the questions about an arm, beyond the limit if need be; return whether there were any."""
        about = [inquiry for inquiry in self._waiting if inquiry.is_about(arm)]
        for inquiry in sorted(about, key=lambda inquiry: inquiry.in_reserve):
            self._start_job(inquiry)
        return bool(about)

    def _start_jobs(self) -> None:
        """Start the jobs of waiting questions in order, without the reserve, up to the limit of jobs at once."""
        for inquiry in [inquiry for inquiry in self._waiting if not inquiry.in_reserve]:
            if len(self._asked) >= self._parallel:
                return
            self._start_job(inquiry)

    def _start_job(self, inquiry: _Inquiry) -> None:
        """Start the job of a question."""
        assert self._submitter is not None
        self._waiting.remove(inquiry)
        self._last_number += 1
        job_id = f"predict-{self._last_number}"
        self._asked[job_id] = inquiry
        self._submitter.submit(job_id, inquiry.work, _TIMEOUT_SECONDS)

    def _collect_answers(self, wait_seconds: float) -> None:
        """Add the answers of ended jobs to the memory models, waiting at most ``wait_seconds`` for one."""
        if not self._asked:
            return
        assert self._submitter is not None
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
            inquiry.file(predicted)
            self._to_store.append((inquiry.identity, predicted))

    def _store_answers(self) -> None:
        """Store new answers in the cache."""
        answered, self._to_store = self._to_store, []
        if self._kept is not None:
            for identity, answer in answered:
                self._kept.keep(identity, answer)


def _inquiries(targets: Sequence[Target], models: Sequence[MemoryModel]) -> Iterable[_Inquiry]:
    """Return the questions about all targets, the reserve last; GPUs of which the answer is the same share one."""
    inquiries: dict[PredictionWork, _Inquiry] = {}
    for in_reserve in (False, True):
        for target, model in zip(targets, models, strict=True):
            for question in target.reserve if in_reserve else target.questions:
                work = question.work(target.chip, target.ceiling)
                if target.traced:
                    work = dataclasses.replace(work, step=target.traced[_allocation_class(question.arm)])
                identity = question.identity(target.chip, target.ceiling)
                inquiry = inquiries.setdefault(identity, _Inquiry(work, identity, in_reserve))
                inquiry.askers.append((model, question))
    return inquiries.values()


def _allocation_class(arm: Arm) -> Arm:
    """Return the arm that stands for all arms that allocate the same on one rank, as a key of traces."""
    return prediction_class(dataclasses.replace(arm, strategy=None, ranks=1, ddp_find_unused_parameters=None))


def _predicted(answer: Answer) -> PredictionAnswer | None:
    """Decode the prediction that a job answered; ``None`` where its process failed or its answer is malformed."""
    try:
        return None if answer.result is None else decode(answer.result, PredictionAnswer)
    except ValueError:
        return None


def _why_unanswered(answer: Answer) -> str:
    """Return in words why a job gave no prediction."""
    if answer.timed_out or answer.overdue:
        return f"tracing a step took longer than {_TIMEOUT_SECONDS:.0f} s"
    words = answer.last_words[:200].rstrip(".")
    return f"tracing a step failed: {words}" if words else "tracing a step failed"


def arms_to_trace(request: SearchRequest) -> ArmsToTrace:
    """Return the settings for which the inspection of the user's own code traces a step, to predict its memory."""
    choices = {"on": (True,), "off": (False,)}.get(request.gradient_checkpointing, (False, True))
    return ArmsToTrace(request.chosen_precisions, choices, tuple(name for name in request.optims if name != OWN_OPTIM))


def most_predictions(cores: int, free_bytes: int | None = None, ranks: int = 1) -> int:
    """Return how many predictions may run at once, limited by cores and by the host's free memory."""
    free_bytes = host_memory().free_bytes if free_bytes is None else free_bytes
    limit = _MOST_PARALLEL if ranks == 1 else _MOST_PARALLEL_OF_RANKS
    return max(1, min(limit, cores, limit if free_bytes is None else free_bytes // _PREDICTION_BYTES))


def forecast_of(
    prepared: Prepared,
    submitter: Submitter | None,
    kept: KeptPredictions | None = None,
    *,
    cores: int | None = None,
    patience_seconds: float | None = None,
) -> Forecast | None:
    """Return the forecast of memory for every candidate of a search; ``None`` on a CPU, which has no predictions.

    ``submitter`` runs the jobs; ``kept`` caches answers. At most half of the ``cores`` (by default, of the trials'
    machine) predict at once. For the user's own code, only arms whose steps the inspection traced are predicted, and
    none on several ranks.
    """
    workload, ranks = prepared.request.workload, prepared.request.ranks
    is_own = workload.source is not None
    if prepared.chip is None or (is_own and ranks > 1):
        # What the user's own code allocates was traced on one rank.
        return None
    traced = {_allocation_class(trace.arm): trace.step for trace in prepared.model.memory} if is_own else {}
    batches, objective = prepared.space.batches, prepared.request.objective
    sizes = sorted(batch for level in batches.levels() for batch in batches.at_level(level)[:_MOST_RUNGS])
    is_free = batches.effective_batch is None
    # For the largest free batch, a question about an arm alone gives its memory at any batch.
    pairs = [] if is_free and objective == "max-batch" else [(batch, batches.accumulation(batch)) for batch in sizes]

    def predictable(arms: Iterable[Arm]) -> list[Arm]:
        """Return the arms whose memory can be predicted."""
        return [
            arm for arm in arms
            if not why_unpredictable(arm, workload) and (not is_own or _allocation_class(arm) in traced)
        ]  # fmt: skip

    # For the largest batch, checkpointing comes first: it needs the least memory. Of several ranks the precisions of
    # 16 bits do: the others are slower, and tried where these fail.
    arms = sorted(
        predictable(prepared.space.arms),
        key=lambda arm: (
            objective == "max-batch" and not arm.gradient_checkpointing,
            ranks > 1 and arm.precision not in ("bf16", "fp16"),
        ),
    )
    multiple = batches.levels()[0] if is_free else None
    inquiries = questions(arms, pairs, multiple)
    reserve = questions(predictable(prepared.space.saving_arms) if arms else [], pairs, multiple)
    layers = prepared.model.checkpointing_layers
    if patience_seconds is None:
        patience_seconds = _LONG_PATIENCE_SECONDS if ranks > 1 or prepared.is_large else _PATIENCE_SECONDS
    return Forecast(
        submitter,
        [Target(prepared.chip, prepared.ceiling, inquiries, layers, reserve, traced)],
        # A trial on a GPU needs one or two cores to feed it.
        parallel=most_predictions((cores or prepared.usable_cores) // 2, ranks=ranks),
        # The user's own code may have changed by the next search, which is not seen without running it.
        kept=None if is_own else kept,
        patience_seconds=patience_seconds,
        asks_ahead=ranks > 1,
    )


class LookAhead:
    """Has the forecast predict what the plan of a search tries next. Without a ``forecast`` nothing is predicted."""

    def __init__(self, forecast: Forecast | None, plan: Plan, prepared: Prepared) -> None:
        self._forecast, self._plan, self._prepared = forecast, plan, prepared
        # One of Optuna's samplers may propose any candidate.
        self._needs_all = prepared.request.sampler in OPTUNA_SAMPLERS

    def is_ready(self) -> bool:
        """Return whether the predictions for the next trial are complete, so that the trial may start.

        Predictions and trials slow each other down. Without a running trial this waits for the predictions. While a
        trial runs, the next one is ready only if the predictions for it are complete.
        """
        forecast = self._forecast
        if forecast is None or forecast.is_complete:
            return True
        if self._plan.owes_baseline:
            workload = self._prepared.request.workload
            if self._prepared.is_large and not self._plan.pending:
                # The baseline may not fit.
                forecast.settle(self._upcoming_arm)
                forecast.settle(lambda: self._prepared.baseline.arm)
            elif workload.is_text or (workload.source is not None and not self._prepared.model.dataloader_num_workers):
                # Predictions may run beside the baseline, whose speed is only a reference. Not where it needs the cores
                # itself: to prepare images, or for the user's own processes that load data.
                forecast.begin(None if self._needs_all else self._upcoming_arm())
            return True
        if self._needs_all:
            if not self._plan.pending:
                forecast.complete()
            return not self._plan.pending
        step = self._plan.next()
        if step is not None and step != "draw" and step.stage != "search":
            return True
        if self._plan.pending:
            arm = self._upcoming_arm()
            return arm is not None and forecast.is_settled(arm)
        forecast.settle(self._upcoming_arm)
        return True

    def _upcoming_arm(self) -> Arm | None:
        """Return the arm of the next trial, or the next memory-saving arm without predictions."""
        upcoming = self._plan.upcoming()
        if upcoming is None and not self._plan.pending:
            # The first answer is there; levers follow, whose memory is predicted before one is chosen.
            assert self._forecast is not None
            unknown = (arm for arm in self._plan.arms_that_save() if not self._forecast.is_settled(arm))
            return next(unknown, None)
        return upcoming.arm if upcoming is not None else None
