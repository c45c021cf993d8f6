"""Predict the peak memory of a candidate from traces with fake tensors; measured peaks say how far to trust that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import PREDICTION_MARGIN, Ceiling
from autotune.core.device import Chip
from autotune.core.outcome import Completed, Outcome, OutOfMemory
from autotune.core.prediction import MemoryPrediction, Operations, PredictionAnswer, PredictionWork, spare_bytes
from autotune.space.arms import arm_that_computes, as_asked, is_traced, predicted_from, prediction_class

# Least cap under which a trial with expandable segments ran, over its peak of allocated bytes, less one: 0.003 to 0.045
# on an H200.
_EXPANDABLE_EXCESS = 0.045
LEAST_EXPANDABLE_EXCESS = 0.003


@dataclass(frozen=True)
class Question:
    """One prediction job: the peaks of one prediction class at some batches."""

    arm: Arm
    batches: tuple[tuple[int, int], ...]
    """Pairs of per-device batch and accumulation."""
    multiple: int | None
    """Also find the largest multiple of this that fits without accumulation; ``None`` leaves it out."""

    def work(self, chip: Chip, ceiling: Ceiling) -> PredictionWork:
        """Return the job for a process that predicts."""
        return PredictionWork(
            as_asked(self.arm), chip.decisive(), ceiling.cap_bytes, ceiling.line_bytes, self.batches, self.multiple
        )

    def identity(self, chip: Chip, ceiling: Ceiling) -> PredictionWork:
        """Return a job that is equal for two questions exactly when their answers are equal."""
        looks = self.arm.ddp_find_unused_parameters
        asked = replace(prediction_class(self.arm), ddp_find_unused_parameters=looks)
        return replace(self.work(chip, ceiling), arm=as_asked(asked))


def questions(arms: Sequence[Arm], batches: Iterable[tuple[int, int]], multiple: int | None) -> list[Question]:
    """Return the questions for arms and ``(batch, accumulation)`` pairs, one for each prediction class.

    Where FSDP is searched without DDP, DDP's classes get a question without a batch, since their operations are needed.
    """
    wanted = tuple(sorted(set(batches)))
    asked: dict[Arm, Question] = {}
    for arm in arms:
        asked.setdefault(prediction_class(arm), Question(arm, wanted, multiple))
    for arm in arms:
        computing = arm_that_computes(arm)
        asked.setdefault(prediction_class(computing), Question(computing, (), None))
    return list(asked.values())


# Relative error of predicted peaks of allocated bytes that is allowed for. On twelve models they were at most 4.9 % too
# high (Llama-3.2-1B, bf16), and within 1.4 % on the others.
_ALLOCATED_DOUBT = 0.05
# Most that the cap had to exceed the peak of allocated bytes for a trial to run: GPT-2, checkpointed, on an H200.
_MOST_FRAGMENTED = 0.27

# 95 % interval of measured over predicted peaks of reserved bytes, less one: quantiles of 118 recorded cells without
# checkpointing and 177 with it (16 models, H200, studies/landscapes). Blocks come to lie at slightly different places,
# which sometimes decides whether a block of the largest size is reused.
_RESERVED_SPREAD = (-0.005, 0.014)
_RESERVED_SPREAD_CHECKPOINTED = (-0.055, 0.022)
# The same upper end for DeepSpeed, an estimate: three recorded peaks, one of each stage, were 1.7 to 3.8 % above the
# predicted ones (BERT-large on two H200, studies/peak_memory.py). What it allocates is not traced but repeated by size.
_ZERO_EXCESS = 0.07
# The same for several ranks under DDP and FSDP: of 62 recorded peaks (four models, two H200, studies/peak_memory.py)
# all but two differed by at most 1.5 %. One under DDP, which held its buckets twice, was 10 % larger than predicted;
# one under FSDP that reduced gradients in each micro-step was 4.5 % smaller.
_RANKS_SPREAD = 0.015


def reserved_interval(prediction: MemoryPrediction, arm: Arm) -> tuple[int, int]:
    """Return the interval of reserved bytes that contained the measured peak in 95 % of recorded cases."""
    if arm.expandable_segments:
        return round(prediction.peak_allocated_bytes * (1 + LEAST_EXPANDABLE_EXCESS)), prediction.peak_reserved_bytes
    low, high = _RESERVED_SPREAD_CHECKPOINTED if arm.gradient_checkpointing else _RESERVED_SPREAD
    if arm.zero_stage is not None:
        high = _ZERO_EXCESS
    elif arm.ranks > 1:
        low, high = -_RANKS_SPREAD, max(high, _RANKS_SPREAD)
    predicted = prediction.peak_reserved_bytes
    return max(prediction.peak_allocated_bytes, round(predicted * (1 + low))), round(predicted * (1 + high))


class MemoryModel:
    """The predicted peaks for one GPU, and how measured peaks agree with them.

    They are kept by prediction class: arms of one class have the same predicted peak at the same batch.
    """

    def __init__(self, ceiling: Ceiling, layers: int | None = None) -> None:
        """Start without predictions. ``layers`` is the number of layers that can use gradient checkpointing."""
        self._ceiling = ceiling
        self._layers = layers
        self._predictions: dict[Arm, dict[tuple[int, int], MemoryPrediction]] = {}
        self._largest: dict[Arm, int] = {}
        self._operations: dict[Arm, Operations] = {}
        self._measured: dict[Candidate, int] = {}
        self._ran_out: dict[Candidate, int] = {}
        """Candidates that ran out of memory, with the largest cap under which each did."""
        self._missed: dict[Arm, str] = {}
        """Prediction classes of which nothing was predicted, with the reason."""
        self._asked: list[Candidate] = []
        """Candidates that were predicted."""
        self._checks: list[tuple[Arm, bool]] | None = None
        self._trusted: dict[Arm, bool] = {}
        """Results of ``trusted`` by prediction class, kept since it is called very often."""
        self.version = 0
        """Increases with every prediction that is added."""

    def add(self, question: Question, answer: PredictionAnswer) -> None:
        """Add the answer of a prediction job."""
        self._forget()
        self.version += 1
        of_class = prediction_class(question.arm)
        for prediction in answer.batches:
            at = prediction.per_device_train_batch_size, prediction.gradient_accumulation_steps
            self._predictions.setdefault(of_class, {})[at] = prediction
            self._asked.append(Candidate(question.arm, *at))
        if answer.largest_batch is not None:
            self._largest[of_class] = answer.largest_batch
        if answer.operations is not None:
            self._operations[of_class] = answer.operations

    def miss(self, question: Question, why: str) -> None:
        """Record why a prediction job gave no answer."""
        self._missed[prediction_class(question.arm)] = why

    def why_missing(self, arm: Arm) -> str | None:
        """Return why an arm has no prediction; ``None`` where its prediction job did not fail."""
        return self._missed.get(prediction_class(arm))

    def operations(self, arm: Arm) -> Operations | None:
        """Return the operations of an arm's step; ``None`` where they are unknown or replaced by other kernels.

        Under DeepSpeed they are unknown: the model itself is in 16 bits there, and the CPU may update it.
        """
        if arm.zero_stage is not None or not is_traced(arm):
            return None
        return self._operations.get(prediction_class(arm_that_computes(arm)))

    def prediction(self, candidate: Candidate) -> MemoryPrediction | None:
        """Return the prediction for a candidate; ``None`` where there is none."""
        arm = candidate.arm
        predicted = self._traced(candidate) or self._derived(candidate)
        return self._expanding(arm, predicted) if predicted and arm.expandable_segments else predicted

    def _traced(self, candidate: Candidate) -> MemoryPrediction | None:
        """Return the prediction from a trace at the candidate's batch; ``None`` where there is none.

        A prediction for another accumulation is corrected by the inputs of more or fewer micro-steps.
        """
        of_class = self._predictions.get(prediction_class(candidate.arm), {})
        batch, accumulation = candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
        if (batch, accumulation) in of_class:
            return of_class[batch, accumulation]
        # Without accumulation, gradients do not outlive the micro-step. So one micro-step never stands for several.
        others = [steps for at, steps in of_class if at == batch and steps > 1]
        if accumulation == 1 or not others:
            return None
        nearest = of_class[batch, min(others, key=lambda steps: abs(steps - accumulation))]
        more_bytes = (accumulation - nearest.gradient_accumulation_steps) * nearest.micro_batch_bytes
        reserved_bytes = nearest.peak_reserved_bytes + more_bytes
        return replace(
            nearest,
            gradient_accumulation_steps=accumulation,
            peak_allocated_bytes=nearest.peak_allocated_bytes + more_bytes,
            peak_reserved_bytes=reserved_bytes,
            fits=nearest.fits and self._fits(candidate.arm, reserved_bytes),
        )

    def _derived(self, candidate: Candidate) -> MemoryPrediction | None:
        """Return the prediction for an arm without a traced step, derived from other arms; ``None`` if they have none.

        Peak memory is affine in the number of checkpointed layers. A mask takes no memory that counts, samples of the
        full length have no padding, and a step with CUDA graphs needs at least the memory of a step without.
        """
        arm = candidate.arm
        plain, keeping = predicted_from(arm)
        whole = self.prediction(replace(candidate, arm=plain)) if plain != arm else None
        if whole is None or arm.checkpointed_layers is None:
            return whole
        kept = self.prediction(replace(candidate, arm=keeping))
        if kept is None or not self._layers:
            return None
        share = min(1.0, arm.checkpointed_layers / self._layers)
        allocated_bytes, reserved_bytes = (
            round(share * recomputed + (1 - share) * stored)
            for recomputed, stored in (
                (whole.peak_allocated_bytes, kept.peak_allocated_bytes),
                (whole.peak_reserved_bytes, kept.peak_reserved_bytes),
            )
        )
        return replace(
            whole,
            peak_allocated_bytes=allocated_bytes,
            peak_reserved_bytes=reserved_bytes,
            runs_out=allocated_bytes > self._ceiling.cap_bytes,
            fits=self._fits(arm, reserved_bytes),
        )

    def _fits(self, arm: Arm, reserved_bytes: int, margin: float = PREDICTION_MARGIN) -> bool:
        """Return whether a predicted peak of an arm fits together with DDP's spare gradients."""
        return self._ceiling.bounds.fits(reserved_bytes + spare_bytes(arm, self.operations(arm)), margin)

    def _expanding(self, arm: Arm, predicted: MemoryPrediction) -> MemoryPrediction:
        """Return the prediction with expandable segments, whose reserved memory is little above allocated memory."""
        reserved = round(predicted.peak_allocated_bytes * (1 + _EXPANDABLE_EXCESS))
        # The excess is the largest that was measured, and so has the margin in it.
        return replace(
            predicted,
            peak_reserved_bytes=reserved,
            runs_out=not self._ceiling.bounds.fits(reserved),
            fits=self._fits(arm, reserved, margin=0.0),
        )

    def batches(self, arm: Arm) -> list[int]:
        """Return the batches that are predicted without accumulation, in ascending order."""
        of_class = self._predictions.get(prediction_class(arm), {})
        return sorted(batch for batch, accumulation in of_class if accumulation == 1)

    def largest_batch(self, arm: Arm) -> int | None:
        """Return the largest batch predicted to fit without accumulation.

        0 where none fits, ``None`` without a prediction.
        """
        return self._largest.get(prediction_class(arm))

    def learn(self, candidate: Candidate, outcome: Outcome, cap_bytes: int | None = None) -> None:
        """Record the outcome of a trial, with which earlier and later predictions are compared.

        ``cap_bytes`` is the trial's memory cap, where it differs from this ceiling's.
        """
        self._forget()
        if isinstance(outcome, Completed):
            measured = outcome.measurement
            steps_run = measured.micro_steps_run
            if measured.micro_batch_bytes is None and 1 < steps_run < candidate.gradient_accumulation_steps:
                # Old records do not count the inputs of micro-steps that were not run.
                candidate = replace(candidate, gradient_accumulation_steps=steps_run)
            self._measured[candidate] = measured.peak_allocated_bytes
        elif isinstance(outcome, OutOfMemory) and outcome.where == "device" and not outcome.disturbed:
            cap = self._ceiling.cap_bytes if cap_bytes is None else cap_bytes
            self._ran_out[candidate] = max(cap, self._ran_out.get(candidate, 0))

    def _forget(self) -> None:
        """Drop values derived from earlier predictions and measurements."""
        self._checks = None
        self._trusted = {}

    def _agreements(self) -> list[tuple[Arm, bool]]:
        """Return, of each prediction that a trial checked, its prediction class and whether the trial agrees.

        A trial that ran out of memory although its predicted peak was far lower disagrees.
        """
        if self._checks is None:
            # The cap may exceed the predicted peak by so much before running out of memory contradicts it.
            most = (1 + _ALLOCATED_DOUBT) * (1 + _MOST_FRAGMENTED)
            measured = [
                (candidate.arm, abs(measured_bytes / predicted.peak_allocated_bytes - 1) <= _ALLOCATED_DOUBT)
                for candidate, measured_bytes in self._measured.items()
                if (predicted := self.prediction(candidate))
            ]
            contradicted = [
                (candidate.arm, False)
                for candidate, cap_bytes in self._ran_out.items()
                if (predicted := self.prediction(candidate)) and predicted.peak_allocated_bytes * most < cap_bytes
            ]
            self._checks = [(prediction_class(arm), agrees) for arm, agrees in (*measured, *contradicted)]
        return self._checks

    def trusted(self, arm: Arm) -> bool:
        """Return whether predictions may rule out candidates of this arm.

        At least one measured peak must agree with its prediction within 5 %. No measured peak of the arm's class may
        disagree. Where the class has no measurement, none of any class may.
        """
        of_class = prediction_class(arm)
        if of_class not in self._trusted:
            every = [agrees for _, agrees in self._agreements()]
            own = [agrees for checked, agrees in self._agreements() if checked == of_class]
            self._trusted[of_class] = any(every) and all(own or every)
        return self._trusted[of_class]

    @property
    def is_checked(self) -> bool:
        """Whether a trial, also one on another machine, has checked a prediction, even if it disagreed."""
        return bool(self._agreements())

    def expects_a_fit(self) -> bool:
        """Return whether a candidate is predicted to fit, or a trial has checked a prediction."""
        return self.is_checked or any(self.likely_fits(candidate) for candidate in self._asked)

    def likely_fits(self, candidate: Candidate) -> bool | None:
        """Return whether the upper end of the predicted memory is under the line; ``None`` without a prediction."""
        predicted = self.prediction(candidate)
        if predicted is None:
            return None
        most_bytes = reserved_interval(predicted, candidate.arm)[1]
        return predicted.fits and self._fits(candidate.arm, most_bytes, margin=0.0)
