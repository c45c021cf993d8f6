"""Write a verification and a comparison of losses as the JSON documents of ``--json``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from autotune.core.look import Look
from autotune.core.verification import RunState
from autotune.verify.comparison import Verdict, slack
from autotune.verify.loss import Comparison
from autotune.verify.throughput import MEMORY_TOLERANCE, Verification, notes


@dataclass(frozen=True, slots=True)
class PromisedDocument:
    """What the study promises of the winner's next run."""

    samples_per_second: float
    samples_per_second_with_new_lengths: float
    """With the extra time of padded lengths that were new to the GPU in the verified steps; the interval is around
    this."""
    samples_per_second_low: float
    samples_per_second_high: float
    relative_half_width: float
    processes_measured: int
    gpu_busy_share: float | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    joules_per_sample: float | None


@dataclass(frozen=True, slots=True)
class ObtainedDocument:
    """What a stock ``Trainer`` did."""

    state: RunState
    message: str | None
    """Why it failed."""
    samples_per_second: float | None
    samples_per_second_low: float | None
    samples_per_second_high: float | None
    """``None`` where a single stretch was timed, whose interval is unbounded."""
    relative_half_width: float | None
    samples_per_second_each: list[float]
    """Of each timed stretch."""
    measured_steps: int
    measured_samples: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    """Of the training steps alone."""
    peak_reserved_with_evaluation_bytes: int | None
    peak_reserved_with_save_bytes: int | None
    peak_reserved_at_the_end_bytes: int | None
    evaluation_seconds: float | None
    save_seconds: float | None
    evaluation_batch_size: int | None
    joules_per_sample: float | None
    skipped_steps: int | None
    new_lengths: int
    """Padded lengths that were new to the GPU."""


@dataclass(frozen=True, slots=True)
class VerificationDocument:
    """A verification of speed and memory."""

    study: str
    model: str
    device: str
    candidate: Any
    """The winner."""
    steps: int
    verdict: Verdict
    why: list[str]
    """Why the intervals cannot tell, or how the run is faster; empty where the promise was kept or missed."""
    kept: bool
    misses: list[str]
    """The promises that were not kept, each in a sentence."""
    promised: PromisedDocument
    obtained: ObtainedDocument
    samples_per_second_ratio: float | None
    peak_ratio: float | None
    peak_judged: Literal["allocated", "reserved"]
    """Which peak is compared with what was promised."""
    peak_reserved_ratio: float | None
    slack: float | None
    """The largest relative slow-down that the run would not refute."""
    memory_tolerance: float
    memory_slack_bytes: int
    cap_bytes: int | None
    notes: list[str]


@dataclass(frozen=True, slots=True)
class LossComparisonDocument:
    """A comparison of the winner's training with the baseline's."""

    same: bool
    candidate: Any
    reference: Any
    """The baseline's settings with as many samples a step."""
    look: Look
    finding: str


def verification_document(verification: Verification) -> VerificationDocument:
    """Return the comparison as ``--json`` prints it; what was not measured is ``None``."""
    target, obtained = verification.target, verification.obtained
    promised, promise, speed = target.promised, verification.promise, verification.speed
    peak = verification.training_peak_bytes
    peaks = {name: peak.reserved for name, peak in obtained.peak_bytes.items()}
    reserved = verification.peak_bytes("reserved")
    return VerificationDocument(
        study=target.report.study.name,
        model=target.report.workload["model"],
        device=target.placement.name,
        candidate=target.best.candidate.parameters(),
        steps=verification.steps,
        verdict=verification.verdict(),
        why=[why] if (why := verification.why()) is not None else [],
        kept=verification.verdict() in ("kept", "faster"),
        misses=verification.misses(),
        promised=PromisedDocument(
            samples_per_second=target.promise.mean,
            samples_per_second_with_new_lengths=promise.mean,
            samples_per_second_low=promise.low,
            samples_per_second_high=promise.high,
            relative_half_width=promise.relative_half_width,
            processes_measured=target.processes,
            gpu_busy_share=promised.gpu_busy_share,
            peak_allocated_bytes=promised.peak_allocated_bytes,
            peak_reserved_bytes=promised.peak_reserved_bytes,
            joules_per_sample=promised.joules_per_sample,
        ),
        obtained=ObtainedDocument(
            state=obtained.state,
            message=obtained.message,
            samples_per_second=speed.mean if speed else None,
            samples_per_second_low=speed.low if speed else None,
            samples_per_second_high=_finite(speed.high) if speed else None,
            relative_half_width=_finite(speed.relative_half_width) if speed else None,
            samples_per_second_each=[stretch.samples / stretch.seconds for stretch in obtained.stretches],
            measured_steps=verification.steps_timed,
            measured_samples=verification.samples_timed,
            peak_allocated_bytes=verification.peak_bytes("allocated"),
            peak_reserved_bytes=reserved,
            peak_reserved_with_evaluation_bytes=peaks.get("evaluate"),
            peak_reserved_with_save_bytes=peaks.get("save"),
            peak_reserved_at_the_end_bytes=peaks.get("end"),
            evaluation_seconds=obtained.pause_seconds.get("evaluate"),
            save_seconds=obtained.pause_seconds.get("save"),
            evaluation_batch_size=obtained.evaluation_batch_size,
            joules_per_sample=obtained.joules_per_sample,
            skipped_steps=obtained.skipped_steps,
            new_lengths=verification.new_shapes,
        ),
        samples_per_second_ratio=speed.mean / promise.mean if speed else None,
        peak_ratio=peak / verification.promised_peak_bytes if peak else None,
        peak_judged="allocated" if verification.judges_allocated else "reserved",
        peak_reserved_ratio=reserved / promised.peak_reserved_bytes if reserved else None,
        slack=_finite(slack(promise, speed)) if speed else None,
        memory_tolerance=MEMORY_TOLERANCE,
        memory_slack_bytes=verification.slack_bytes,
        cap_bytes=target.cap_bytes,
        notes=notes(verification),
    )


def comparison_document(comparison: Comparison) -> LossComparisonDocument:
    """Return a comparison of losses as ``--json`` prints it."""
    return LossComparisonDocument(
        same=comparison.is_same,
        candidate=comparison.candidate.parameters(),
        reference=comparison.reference.parameters(),
        look=comparison.look,
        finding=comparison.sentence(),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
