"""What peak memory a candidate will reach on a GPU: predicted with fake tensors, corrected by what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.ceiling import PREDICTION_MARGIN
from autotune.core.outcome import Completed, Failed, Outcome, OutOfMemory
from autotune.devices import Ceiling
from autotune.devices.gpus import Chip
from autotune.space.dataloader import plain_loader


@dataclass(frozen=True)
class MemoryPrediction:
    """The predicted peaks of one arm at one per-device batch and accumulation."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    micro_batch_bytes: int
    """What the inputs of one micro-step take. The Trainer has those of all micro-steps on the device at once."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """By a model of the caching allocator, without meeting the cap where that could be helped."""
    runs_out: bool
    """The cap is met even after cached segments are given back."""
    fits: bool
    """It does not run out and stays under the line."""
    anatomy: dict[str, int]
    """What the peak consists of: weights, gradients, optimizer, activations, inputs, workspaces.

    Logits and the loss are among the activations, which they are to the allocator."""


def memory_class(arm: Arm) -> Arm:
    """The arm that stands for all that need the same bytes: bf16 as fp16, tf32 as fp32, pinned or not.

    Recorded peaks of such twins on an H200 differ by no more than a loss scaler, 2 MiB.
    """
    twins = {"bf16": "fp16", "tf32": "fp32"}
    return dataclasses.replace(
        plain_loader(arm),
        precision=twins.get(arm.precision, arm.precision),  # type: ignore[arg-type]
        cpu_affinity=False,
    )


def prediction_class(arm: Arm) -> Arm:
    """The arm that stands for all that allocate the same bytes, however the allocator reserves them."""
    return dataclasses.replace(memory_class(arm), expandable_segments=False)


# Caps that were needed over what was allocated, on an H200 with segments that expand: 0.3 to 4.5 %.
_EXPANDABLE_EXCESS = 0.045
_LEAST_EXPANDABLE_EXCESS = 0.003


@dataclass(frozen=True)
class Question:
    """One prediction job: a memory class, at some batches."""

    arm: Arm
    batches: tuple[tuple[int, int], ...]
    """Pairs of per-device batch and accumulation."""
    multiple: int | None
    """Also find the largest multiple of this that fits, without accumulation."""

    def details(self, chip: Chip, ceiling: Ceiling) -> Document:
        """The job's part of the message to the trial server: all but the workload that the answer follows from."""
        return {
            "arm": _arm_document(self.arm),
            "batches": [list(batch) for batch in self.batches],
            "multiple": self.multiple,
            "chip": chip.decisive_document(),
            "cap_bytes": ceiling.cap_bytes,
            "line_bytes": ceiling.line_bytes,
        }

    def identity(self, chip: Chip, ceiling: Ceiling) -> Document:
        """The same for two questions exactly when their answers are: arms of one class need the same bytes."""
        return {**self.details(chip, ceiling), "arm": _arm_document(prediction_class(self.arm))}


def _arm_document(arm: Arm) -> Document:
    """An arm without the placement of its process: no byte depends on it, and stored answers have no such field."""
    document = dataclasses.asdict(arm)
    del document["cpu_affinity"]
    return document


def questions(arms: Sequence[Arm], batches: Iterable[tuple[int, int]], multiple: int | None) -> list[Question]:
    """What to ask for these arms and ``(batch, accumulation)`` pairs, each memory class once, in the arms' order."""
    wanted = tuple(sorted(set(batches)))
    first_of_class: dict[Arm, Arm] = {}
    for arm in arms:
        first_of_class.setdefault(prediction_class(arm), arm)
    return [Question(arm, wanted, multiple) for arm in first_of_class.values()]


# A trial that is predicted to be over is skipped only when that is beyond doubt. On twelve models the
# peak of allocated bytes was predicted at most 4.9 % too high (Llama-3.2-1B, bf16), else within 1.4 %.
_ALLOCATED_DOUBT = 0.05
# The most that a cap had to exceed the peak of allocated bytes for a trial to run under it: GPT-2, checkpointed, H200.
_MOST_FRAGMENTED = 0.27


# Measured over predicted peaks of reserved bytes, less one: the 2.5 % and 97.5 % quantiles of 118 recorded cells
# without checkpointing and 177 with it (16 models, H200, studies/landscapes). Where blocks come to lie differs a
# little, and now and then that decides whether a block of the largest size is used again.
_RESERVED_SPREAD = (-0.005, 0.014)
_RESERVED_SPREAD_CHECKPOINTED = (-0.055, 0.022)


def reserved_interval(prediction: MemoryPrediction, arm: Arm) -> tuple[int, int]:
    """The bytes between which the measured peak of reserved memory was in 95 % of recorded cells."""
    if arm.expandable_segments:
        return round(prediction.peak_allocated_bytes * (1 + _LEAST_EXPANDABLE_EXCESS)), prediction.peak_reserved_bytes
    low, high = _RESERVED_SPREAD_CHECKPOINTED if arm.gradient_checkpointing else _RESERVED_SPREAD
    predicted = prediction.peak_reserved_bytes
    return max(prediction.peak_allocated_bytes, round(predicted * (1 + low))), round(predicted * (1 + high))


@dataclass(frozen=True)
class Check:
    """A predicted peak of allocated bytes beside what a trial showed."""

    arm: Arm
    """The prediction class of what was measured."""
    predicted_bytes: int
    measured_bytes: int | None
    """``None`` where the trial ran out of memory although it was predicted to fit by far."""

    @property
    def relative_error(self) -> float | None:
        """Measured over predicted, less one."""
        return None if self.measured_bytes is None else self.measured_bytes / self.predicted_bytes - 1

    @property
    def agrees(self) -> bool:
        """Whether the measured peak is near enough for predictions of its class to rule anything out."""
        error = self.relative_error
        return error is not None and abs(error) <= _ALLOCATED_DOUBT


@dataclass(frozen=True)
class _Correction:
    """What measurements say about predicted peaks: ``ratio × predicted + offset``."""

    ratio: float = 1.0
    offset_bytes: float = 0.0

    def of(self, predicted_bytes: int) -> int:
        """The corrected peak."""
        return round(self.ratio * predicted_bytes + self.offset_bytes)


def _correction(checks: Sequence[Check]) -> _Correction:
    """Fit measured to predicted peaks of one class.

    Where all agree, the median offset: what is missing is nearly the same at every batch. Else the slope is wrong,
    too: the median slope between two measurements (Theil-Sen), or with one measurement the line through zero.
    """
    points = [(check.predicted_bytes, check.measured_bytes) for check in checks if check.measured_bytes is not None]
    if not points:
        return _Correction()
    ratio = 1.0
    if not all(check.agrees for check in checks):
        slopes = [(y - b) / (x - a) for (a, b), (x, y) in itertools.combinations(points, 2) if x != a]
        ratio = statistics.median([slope for slope in slopes if slope > 0] or [y / x for x, y in points])
        if not slopes:
            return _Correction(ratio)
    return _Correction(ratio, statistics.median(y - ratio * x for x, y in points))


def _typical_correction(checks: Sequence[Check]) -> _Correction:
    """What other classes say of one that was not measured: their median ratio, where they disagree at all."""
    errors = [check.relative_error for check in checks if check.relative_error is not None]
    if not errors or all(check.agrees for check in checks):
        return _Correction()
    return _Correction(1 + statistics.median(errors))


def _needs_no_less(candidate: Candidate, over: Candidate) -> bool:
    """Whether what ran out of memory shows that the candidate does not fit: at no larger a batch, with no more kept."""
    arm = candidate.arm
    classes = {prediction_class(arm), prediction_class(dataclasses.replace(arm, gradient_checkpointing=True))}
    return (
        prediction_class(over.arm) in classes
        and over.per_device_train_batch_size <= candidate.per_device_train_batch_size
        and over.accumulates <= candidate.accumulates
    )


def _at(
    of_class: dict[tuple[int, int], MemoryPrediction], candidate: Candidate, line_bytes: int
) -> MemoryPrediction | None:
    """Return the prediction for the candidate's batch and accumulation.

    Where only another accumulation of this batch was asked about, its prediction with so many more or fewer inputs.
    """
    batch, accumulation = candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
    if (batch, accumulation) in of_class:
        return of_class[batch, accumulation]
    # Gradients outlive a micro-step only where there are several, so one never stands for more.
    others = [steps for at, steps in of_class if at == batch and steps > 1]
    if accumulation == 1 or not others:
        return None
    known = of_class[batch, min(others, key=lambda steps: abs(steps - accumulation))]
    more_bytes = (accumulation - known.gradient_accumulation_steps) * known.micro_batch_bytes
    reserved_bytes = known.peak_reserved_bytes + more_bytes
    return dataclasses.replace(
        known,
        gradient_accumulation_steps=accumulation,
        peak_allocated_bytes=known.peak_allocated_bytes + more_bytes,
        peak_reserved_bytes=reserved_bytes,
        fits=known.fits and reserved_bytes <= line_bytes * (1 - PREDICTION_MARGIN),
    )


class MemoryModel:
    """Predictions filed by memory class, and the corrections that measurements taught."""

    def __init__(self, ceiling: Ceiling) -> None:
        self._ceiling = ceiling
        self._predictions: dict[Arm, dict[tuple[int, int], MemoryPrediction]] = {}
        self._largest: dict[Arm, int] = {}
        self._measured: dict[Candidate, int] = {}
        self._ran_out: dict[Candidate, int] = {}
        """Candidates that ran out of memory, each with the largest cap that was too small for it."""
        self._failed: set[Arm] = set()
        """Prediction classes in which a trial failed for another reason."""
        self._asked: list[Candidate] = []
        """What was asked about, as candidates of the arms that asked."""
        self._checks: list[Check] | None = None
        self._checkable: bool | None = None
        self._learnt: dict[Arm, tuple[bool, _Correction]] = {}
        """By prediction class: whether predictions are trusted, and their correction. Both are asked very often."""
        self.version = 0
        """Grows with every prediction that is filed."""

    def add(self, question: Question, answer: Document) -> None:
        """File what a prediction job answered."""
        self._forget()
        self.version += 1
        for document in answer["batches"]:
            prediction = MemoryPrediction(**document)
            known = self._predictions.setdefault(prediction_class(question.arm), {})
            at = prediction.per_device_train_batch_size, prediction.gradient_accumulation_steps
            known[at] = prediction
            self._asked.append(Candidate(question.arm, *at))
        if answer["largest_batch"] is not None:
            self._largest[prediction_class(question.arm)] = int(answer["largest_batch"])

    def prediction(self, candidate: Candidate) -> MemoryPrediction | None:
        """What is predicted for a candidate, uncorrected; ``None`` where nothing is."""
        of_class = self._predictions.get(prediction_class(candidate.arm), {})
        predicted = _at(of_class, candidate, self._ceiling.line_bytes)
        return self._expanding(predicted) if predicted and candidate.arm.expandable_segments else predicted

    def _expanding(self, predicted: MemoryPrediction) -> MemoryPrediction:
        """The same where segments expand: what is reserved is little more than what is allocated."""
        reserved = round(predicted.peak_allocated_bytes * (1 + _EXPANDABLE_EXCESS))
        over = reserved > self._ceiling.line_bytes
        return dataclasses.replace(predicted, peak_reserved_bytes=reserved, runs_out=over, fits=not over)

    def batches(self, arm: Arm) -> list[int]:
        """The batches for which something is predicted without accumulation, ascending."""
        of_class = self._predictions.get(prediction_class(arm), {})
        return sorted(batch for batch, accumulation in of_class if accumulation == 1)

    def largest_batch(self, arm: Arm) -> int | None:
        """The largest batch without accumulation that is predicted to fit; 0 where none is."""
        return self._largest.get(prediction_class(arm))

    def learn(self, candidate: Candidate, outcome: Outcome, cap_bytes: int | None = None) -> None:
        """Take an outcome into account for all candidates, whether they are predicted by now or later.

        ``cap_bytes`` is the cap that the trial had, where it was not this ceiling's.
        """
        self._forget()
        if isinstance(outcome, Completed):
            measured = outcome.measurement
            run = measured.micro_steps_run
            if measured.micro_batch_bytes is None and 1 < run < candidate.gradient_accumulation_steps:
                # Recorded before the inputs of micro-steps that are not run were counted.
                candidate = dataclasses.replace(candidate, gradient_accumulation_steps=run)
            self._measured[candidate] = measured.peak_allocated_bytes
        elif isinstance(outcome, OutOfMemory) and outcome.where == "device" and not outcome.disturbed:
            cap = self._ceiling.cap_bytes if cap_bytes is None else cap_bytes
            self._ran_out[candidate] = max(cap, self._ran_out.get(candidate, 0))
        elif isinstance(outcome, Failed):
            self._failed.add(prediction_class(candidate.arm))

    def _forget(self) -> None:
        """Drop what was derived from predictions and measurements: there is more of them now."""
        self._checks = self._checkable = None
        self._learnt = {}

    def checks(self) -> list[Check]:
        """Every prediction that a trial has confirmed or contradicted."""
        if self._checks is None:
            self._checks = [*self._measured_checks(), *self._contradictions()]
        return self._checks

    def _measured_checks(self) -> Iterator[Check]:
        for candidate, measured in self._measured.items():
            if predicted := self.prediction(candidate):
                yield Check(prediction_class(candidate.arm), predicted.peak_allocated_bytes, measured)

    def _contradictions(self) -> Iterator[Check]:
        """Trials that ran out of memory although they were predicted to fit by far."""
        most = (1 + _ALLOCATED_DOUBT) * (1 + _MOST_FRAGMENTED)
        for candidate, cap_bytes in self._ran_out.items():
            predicted = self.prediction(candidate)
            if predicted and predicted.peak_allocated_bytes * most < cap_bytes:
                yield Check(prediction_class(candidate.arm), predicted.peak_allocated_bytes, None)

    def _learn_of(self, arm: Arm) -> tuple[bool, _Correction]:
        """Whether predictions for an arm are trusted, and their correction."""
        of_class = prediction_class(arm)
        if of_class not in self._learnt:
            checks = self.checks()
            own = [check for check in checks if check.arm == of_class]
            trusted = any(check.agrees for check in checks) and all(check.agrees for check in own or checks)
            self._learnt[of_class] = trusted, _correction(own) if own else _typical_correction(checks)
        return self._learnt[of_class]

    def trusted(self, arm: Arm) -> bool:
        """Whether predictions may rule out candidates of this arm.

        Some measured peak must agree with its prediction within 5 %, and none may disagree: none of the arm's class
        where something was measured there, else none at all.
        """
        return self._learn_of(arm)[0]

    def worst_error(self) -> float | None:
        """The largest relative error of a predicted peak so far; ``None`` where nothing was measured."""
        errors = [check.relative_error for check in self.checks() if check.relative_error is not None]
        return max(errors, key=abs, default=None)

    def peak_allocated_bytes(self, candidate: Candidate) -> int | None:
        """The predicted peak, corrected by what was measured."""
        predicted = self.prediction(candidate)
        if predicted is None:
            return None
        return self._learn_of(candidate.arm)[1].of(predicted.peak_allocated_bytes)

    def surely_over(self, candidate: Candidate) -> bool:
        """Whether the candidate is beyond doubt too large: what it must allocate alone is over the line.

        Only predictions that were checked on this machine can say so for good. Before the first check the candidate
        only has to wait, for as long as there is one to try that is predicted to fit.
        """
        peak = self.peak_allocated_bytes(candidate)
        if peak is None or peak * (1 - _ALLOCATED_DOUBT) <= self._ceiling.line_bytes:
            return False
        return self.trusted(candidate.arm) or (not self.checks() and self._can_be_checked())

    def _can_be_checked(self) -> bool:
        """Whether a candidate that is predicted to fit is still to be tried, and nothing speaks against it."""
        if self._checkable is None:
            self._checkable = any(
                prediction_class(candidate.arm) not in self._failed
                and not any(_needs_no_less(candidate, over) for over in self._ran_out)
                and self.likely_fits(candidate)
                for candidate in self._asked
            )
        return self._checkable

    def likely_fits(self, candidate: Candidate) -> bool | None:
        """Whether the candidate is predicted to fit, by the upper end of what it may reserve.

        ``None`` where nothing is predicted.
        """
        predicted = self.prediction(candidate)
        if predicted is None:
            return None
        correction = self._learn_of(candidate.arm)[1]
        corrected = reserved_interval(predicted, candidate.arm)[1] - predicted.peak_allocated_bytes
        corrected += correction.of(predicted.peak_allocated_bytes)
        # A verdict that rests on a ratio that is known to be wrong is made anew.
        return (predicted.fits or correction.ratio < 1) and corrected <= self._ceiling.line_bytes
