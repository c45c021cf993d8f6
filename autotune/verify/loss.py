"""Compare the loss and gradient norms of a study's winner with its baseline's, within the precision's rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import DifferentTrainingError, InvalidRequestError, TrialServerError
from autotune.core.verification import LossCurve
from autotune.execution.oneshot import run_fresh
from autotune.space.levers import applied_settings
from autotune.space.space import Batches
from autotune.space.training_arguments import training_arguments
from autotune.verify.target import Target

DEFAULT_STEPS = 8
# Unit roundoffs: half the distance from 1 to the next number, with 24, 11, 11 and 8 significant bits.
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
# Tolerances in unit roundoffs. Losses of 8 steps differed by up to 0.04 of bf16 and 2.3 of fp32 (tiny models on a CPU),
# gradient norms by 0.4 and 2.5; depth adds to that. fp32 differs by the order of sums, hence the least tolerances.
LOSS_ROUNDOFFS = 4
GRADIENT_ROUNDOFFS = 16
LEAST_LOSS_TOLERANCE = 1e-4
LEAST_GRADIENT_TOLERANCE = 1e-3
_TIMEOUT_SECONDS = 1200.0


@dataclass(frozen=True)
class LossComparison:
    """Losses and gradient norms of the winner and of a reference, step by step over the same samples."""

    candidate: Candidate
    reference: Candidate
    dtype: str
    candidate_curve: LossCurve
    reference_curve: LossCurve

    @property
    def steps(self) -> int:
        """Number of comparable steps: up to the first whose update fp16's gradient scaler skipped in either."""
        curves = self.candidate_curve, self.reference_curve
        steps = min(len(curve.losses) for curve in curves)
        skipped = [next((i + 1 for i, n in enumerate(curve.skipped) if n), steps) for curve in curves]
        return min(steps, *skipped)

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the coarser precision of the two, or of the weights where it is coarser still."""
        stored = {"float32": 0.0, "bfloat16": UNIT_ROUNDOFF["bf16"], "float16": UNIT_ROUNDOFF["fp16"]}[self.dtype]
        return max(stored, *(UNIT_ROUNDOFF[c.arm.precision] for c in (self.candidate, self.reference)))

    @property
    def loss_tolerance(self) -> float:
        """Largest relative difference of two losses."""
        return max(LEAST_LOSS_TOLERANCE, LOSS_ROUNDOFFS * self.roundoff)

    @property
    def gradient_tolerance(self) -> float:
        """Largest relative difference of two gradient norms."""
        return max(LEAST_GRADIENT_TOLERANCE, GRADIENT_ROUNDOFFS * self.roundoff)

    @property
    def loss_difference(self) -> float:
        """Largest measured relative difference of a step's losses."""
        return self._difference(self.candidate_curve.losses, self.reference_curve.losses)

    @property
    def gradient_difference(self) -> float:
        """Largest measured relative difference of a step's gradient norms."""
        return self._difference(self.candidate_curve.gradient_norms, self.reference_curve.gradient_norms)

    @property
    def accumulation_factor(self) -> float | None:
        """Ratio of the first losses where it equals the ratio of accumulation steps, else ``None``.

        Only the first loss is compared, since later ones follow updates with different gradients.

        transformers divides the loss by the accumulation steps, or lets the model divide it by the number of labels. A
        model whose ``forward`` accepts any keyword and ignores ``num_items_in_batch`` gets neither.
        """
        factor = self.candidate.gradient_accumulation_steps / self.reference.gradient_accumulation_steps
        is_so = factor != 1 and self._first_loss_difference(factor) <= self.loss_tolerance
        return factor if is_so and not self.is_same else None

    def _first_loss_difference(self, factor: float) -> float:
        """Return the relative difference of the first losses where the candidate's is divided by a factor."""
        ours = [loss / factor for loss in self.candidate_curve.losses[:1]]
        return self._difference(ours, self.reference_curve.losses[:1])

    def _difference(self, ours: Sequence[float], theirs: Sequence[float]) -> float:
        """Return the largest relative difference of the comparable steps; infinite where one is not finite."""
        pairs = list(zip(ours, theirs, strict=False))[: self.steps]
        differences = [abs(mine - other) / max(abs(other), 1e-12) for mine, other in pairs]
        return max(differences) if differences and all(map(math.isfinite, differences)) else math.inf

    @property
    def is_same(self) -> bool:
        """Whether losses and gradient norms agree within the tolerance of the precision."""
        return self.loss_difference <= self.loss_tolerance and self.gradient_difference <= self.gradient_tolerance

    def sentence(self) -> str:
        """Return the result in one line."""
        against = f"{self.candidate.describe()} against {self.reference.describe()}"
        over = f"over {self.steps} steps without dropout"
        factor = self.accumulation_factor
        if factor is not None:
            return (
                f"different training: {against} has losses and gradients {factor:g} times as large {over}, the ratio "
                f"of accumulation steps, by which neither model nor Trainer divides; divided, the first loss "
                f"differs by {self._first_loss_difference(factor):.2g} ({self.loss_tolerance:.2g} allowed)"
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


def reference_of(candidate: Candidate, baseline: Arm) -> Candidate:
    """Return the baseline's settings with as many samples a step as the candidate.

    The optimizer is the candidate's: another one would be another training.
    """
    batch, accumulation = Batches(candidate.samples_per_step).baseline()
    return Candidate(dataclasses.replace(baseline, optim=candidate.arm.optim), batch, accumulation)


def check_can_compare(target: Target) -> None:
    """Raise ``InvalidRequestError`` where two candidates would not see the same samples."""
    if target.best.candidate.arm.ranks > 1:
        raise InvalidRequestError(
            f"the study {target.report.study.name!r} was measured on {target.best.candidate.arm.ranks} ranks, on which "
            "losses are not compared",
            "search the same model on one GPU; autotune verify without --same-loss runs all ranks",
        )
    if target.has_data:
        # Batches of other sizes are padded to other lengths and masked at other places.
        raise InvalidRequestError(
            f"the study {target.report.study.name!r} was searched with its own dataset, on which losses are not "
            "compared",
            "search the same model without --dataset; autotune verify without --same-loss runs on the data",
        )


def compare_losses(target: Target, steps: int, log_path: Path) -> LossComparison:
    """Train winner and reference a few steps each, in fresh processes; the reference with smaller batches if needed."""
    if steps < 1:
        raise InvalidRequestError(f"--same-loss {steps} compares nothing", "use 1 or more")
    check_can_compare(target)
    candidate, baseline = target.best.candidate, target.report.baseline
    plain = Arm(attn_implementation=candidate.arm.attn_implementation)
    reference = reference_of(candidate, baseline.candidate.arm if baseline else plain)
    curve = _curve(target, candidate, steps, log_path)
    if curve.state != "completed":
        raise TrialServerError(f"the winner did not train: {curve.message}", f"its log is {log_path}")
    while True:
        against = _curve(target, reference, steps, log_path)
        batch = reference.per_device_train_batch_size
        if against.state != "out_of_memory" or batch == 1:
            break
        smaller = max(size for size in range(1, batch) if candidate.samples_per_step % size == 0)
        reference = Candidate(reference.arm, smaller, candidate.samples_per_step // smaller)
    if against.state != "completed":
        raise TrialServerError(f"the baseline did not train: {against.message}", f"its log is {log_path}")
    return LossComparison(candidate, reference, target.report.workload["dtype"], curve, against)


def _curve(target: Target, candidate: Candidate, steps: int, log_path: Path) -> LossCurve:
    environment = target.report.environment
    fields, revision = environment["training_arguments_fields"], environment.get("measurement_revision", 1)
    arguments = training_arguments(candidate, fields, environment["device_kind"], revision)
    work = dataclasses.replace(
        target.work(steps, evaluates=False),
        arguments=dict(arguments),
        attn_implementation=candidate.arm.attn_implementation,
        applied=applied_settings(candidate.arm),
    )
    return run_fresh(
        "autotune.worker.verify.loss_curve",
        work,
        LossCurve,
        target.placement,
        log_path,
        _TIMEOUT_SECONDS,
        offline=work.workload.weights is None,
    )
