"""Whether a study's winner trains as its baseline does: the same losses, as far as its precision lets them be."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.errors import DifferentTrainingError, InvalidRequestError, TrialServerError
from autotune.execution.oneshot import run_fresh
from autotune.space.space import Batches
from autotune.space.training_arguments import training_arguments
from autotune.verify.target import Subject

DEFAULT_STEPS = 8
# Unit roundoffs: half the distance from 1 to the next number of 24, 11, 11 and 8 significant bits.
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
# Losses of 8 steps differed by up to 0.04 unit roundoffs of bf16 and 2.3 of fp32 (tiny models on a CPU), gradient
# norms by 0.4 and 2.5; depth adds to that. In fp32 what is left are sums in another order: hence the least tolerances.
LOSS_ROUNDOFFS = 4
GRADIENT_ROUNDOFFS = 16
LEAST_LOSS_TOLERANCE = 1e-4
LEAST_GRADIENT_TOLERANCE = 1e-3
_TIMEOUT_SECONDS = 1200.0


@dataclass(frozen=True)
class LossComparison:
    """Losses and gradient norms of the winner and of a reference, step for step over the same samples."""

    candidate: Candidate
    reference: Candidate
    dtype: str
    candidate_curve: Document
    reference_curve: Document

    @property
    def steps(self) -> int:
        """Steps that can be compared: up to the first whose update fp16's scaler left out in either."""
        steps = min(len(self.candidate_curve["losses"]), len(self.reference_curve["losses"]))
        skipped = [next((i + 1 for i, n in enumerate(c["skipped"]) if n), steps) for c in self._curves]
        return min(steps, *skipped)

    @property
    def _curves(self) -> tuple[Document, Document]:
        return self.candidate_curve, self.reference_curve

    @property
    def roundoff(self) -> float:
        """Of the coarser of the two precisions, or of the weights where they are coarser still."""
        stored = {"float32": 0.0, "bfloat16": UNIT_ROUNDOFF["bf16"], "float16": UNIT_ROUNDOFF["fp16"]}[self.dtype]
        return max(stored, *(UNIT_ROUNDOFF[c.arm.precision] for c in (self.candidate, self.reference)))

    @property
    def loss_tolerance(self) -> float:
        """How far two losses may differ, relatively."""
        return max(LEAST_LOSS_TOLERANCE, LOSS_ROUNDOFFS * self.roundoff)

    @property
    def gradient_tolerance(self) -> float:
        """How far two gradient norms may differ, relatively."""
        return max(LEAST_GRADIENT_TOLERANCE, GRADIENT_ROUNDOFFS * self.roundoff)

    @property
    def loss_difference(self) -> float:
        """The largest relative difference of the losses of a step."""
        return self._difference("losses", 1.0)

    @property
    def gradient_difference(self) -> float:
        """The same of the gradient norms."""
        return self._difference("gradient_norms", 1.0)

    @property
    def accumulation_factor(self) -> float | None:
        """By how much the winner's first loss is larger where that is the ratio of accumulations, else ``None``.

        The first loss alone, since later ones follow updates that such gradients have made different.

        transformers divides by the accumulation, or has the model divide by the number of labels, unless a model's
        ``forward`` takes any keyword and then ignores ``num_items_in_batch``: then nobody does.
        """
        factor = self.candidate.gradient_accumulation_steps / self.reference.gradient_accumulation_steps
        is_so = factor != 1 and self._difference("losses", factor, first=1) <= self.loss_tolerance
        return factor if is_so and not self.is_same else None

    def _difference(self, what: str, factor: float, first: int | None = None) -> float:
        """The largest of ``|candidate / factor - reference| / |reference|``; infinite where one is no number."""
        compared = self.steps if first is None else min(first, self.steps)
        pairs = list(zip(self.candidate_curve[what], self.reference_curve[what], strict=False))[:compared]
        found = [abs(ours / factor - theirs) / max(abs(theirs), 1e-12) for ours, theirs in pairs]
        return max(found) if found and all(map(math.isfinite, found)) else math.inf

    @property
    def is_same(self) -> bool:
        """Losses and gradient norms agree within the tolerance of the precision."""
        return self.loss_difference <= self.loss_tolerance and self.gradient_difference <= self.gradient_tolerance

    def sentence(self) -> str:
        """The finding in one line."""
        against = f"{self.candidate.describe()} against {self.reference.describe()}"
        over = f"over {self.steps} steps without dropout"
        factor = self.accumulation_factor
        if factor is not None:
            return (
                f"different training: {against} has losses and gradients {factor:g} times as large {over}, as its "
                f"accumulation is: neither model nor Trainer divides by it; divided, the first loss differs by "
                f"{self._difference('losses', factor, first=1):.2g} ({self.loss_tolerance:.2g} allowed)"
            )
        return (
            f"{'the same training' if self.is_same else 'different training'}: {against}: {over} losses differ by at "
            f"most {self.loss_difference:.2g} ({self.loss_tolerance:.2g} allowed), gradient norms by "
            f"{self.gradient_difference:.2g} ({self.gradient_tolerance:.2g})"
        )

    def check(self) -> None:
        """Raise ``DifferentTrainingError`` where the two do not train alike."""
        if self.is_same:
            return
        hint = "compare a few hundred steps of both on your own data before you rely on it"
        if self.accumulation_factor is not None:
            hint = "set model.accepts_loss_kwargs = False before the Trainer is made, so that it divides"
        raise DifferentTrainingError(self.sentence(), hint)

    def document(self) -> Document:
        """As ``--json`` prints it."""
        return {
            "same": self.is_same,
            "candidate": self.candidate.parameters(),
            "reference": self.reference.parameters(),
            "steps": self.steps,
            "loss_difference": _finite(self.loss_difference),
            "loss_tolerance": self.loss_tolerance,
            "gradient_norm_difference": _finite(self.gradient_difference),
            "gradient_norm_tolerance": self.gradient_tolerance,
            "accumulation_factor": self.accumulation_factor,
            "losses": [self.candidate_curve["losses"], self.reference_curve["losses"]],
            "gradient_norms": [self.candidate_curve["gradient_norms"], self.reference_curve["gradient_norms"]],
            "finding": self.sentence(),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def reference_of(candidate: Candidate, baseline: Arm) -> Candidate:
    """The baseline's way to train as many samples a step as the candidate does.

    The optimizer stays the candidate's: it was asked for, and another one is another training.
    """
    batch, accumulation = Batches(candidate.samples_per_step).baseline()
    return Candidate(dataclasses.replace(baseline, optim=candidate.arm.optim), batch, accumulation)


def check_can_compare(subject: Subject) -> None:
    """``InvalidRequestError`` where two ways of training do not see the same samples."""
    if subject.has_data:
        # Batches of other sizes are padded to other lengths and masked at other places.
        raise InvalidRequestError(
            f"the study {subject.report.study.name!r} was searched with data of its own, on which losses are not "
            "compared",
            "search the same model without --dataset; autotune verify without --same-loss runs on the data",
        )


def compare_losses(subject: Subject, steps: int, log_path: Path) -> LossComparison:
    """Train winner and reference a few steps each, in processes of their own; smaller batches where memory ends."""
    if steps < 1:
        raise InvalidRequestError(f"--same-loss {steps} compares nothing", "use 1 or more")
    check_can_compare(subject)
    candidate, baseline = subject.best.candidate, subject.report.baseline
    plain = Arm(attn_implementation=candidate.arm.attn_implementation)
    reference = reference_of(candidate, baseline.candidate.arm if baseline else plain)
    curve = _curve(subject, candidate, steps, log_path)
    if curve["state"] != "completed":
        raise TrialServerError(f"the winner did not train: {curve['message']}", f"its log is {log_path}")
    while True:
        against = _curve(subject, reference, steps, log_path)
        batch = reference.per_device_train_batch_size
        if against["state"] != "out_of_memory" or batch == 1:
            break
        smaller = max(size for size in range(1, batch) if candidate.samples_per_step % size == 0)
        reference = Candidate(reference.arm, smaller, candidate.samples_per_step // smaller)
    if against["state"] != "completed":
        raise TrialServerError(f"the baseline did not train: {against['message']}", f"its log is {log_path}")
    return LossComparison(candidate, reference, subject.report.workload["dtype"], curve, against)


def _curve(subject: Subject, candidate: Candidate, steps: int, log_path: Path) -> Document:
    environment = subject.report.environment
    fields, revision = environment["training_arguments_fields"], environment.get("measurement_revision", 1)
    arguments = training_arguments(candidate, fields, environment["device_kind"], revision)
    job = {
        **subject.job(steps, evaluates=False),
        "arguments": arguments,
        "attn_implementation": candidate.arm.attn_implementation,
    }
    return run_fresh("autotune.worker.verify.loss_curve", job, subject.placement, log_path, _TIMEOUT_SECONDS)
