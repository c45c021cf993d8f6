"""Compare a result with what an informed user runs, and with the arithmetic that its GPU is rated at.

The expert's settings are bf16 at the largest batch that fits and nothing else, with activations recomputed where
nothing fits without; where there is no bf16, the fastest precision. What ran within the memory limit fits an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.core.candidate import OF_RANKS, Arm, Candidate
from autotune.core.device import Precision
from autotune.core.errors import InvalidRequestError
from autotune.core.outcome import Measurement
from autotune.devices.gpus import chip_of_device
from autotune.estimate.history import Tried, speed_of
from autotune.estimate.step_time import peak_flops
from autotune.results.report import Report, measurement
from autotune.space.arms import levers_of
from autotune.space.levers import LEVERS
from autotune.space.space import Batches

# What an expert chooses, or what follows from the model and the GPUs.
_CHOSEN = frozenset(("precision", "gradient_checkpointing", "attn_implementation", "optim", *OF_RANKS))
_OTHERS = frozenset(row.name for row in LEVERS) - _CHOSEN
# Peak and speed are predicted for batches of up to so many times the largest that was measured. A choice.
_FARTHEST = 4


@dataclass(frozen=True, slots=True)
class Expert:
    """The expert's settings and their speed."""

    candidate: Candidate
    samples_per_second: float
    is_measured: bool
    """Whether a trial measured them; else a larger batch may fit than was tried, whose speed is predicted."""
    may_be_larger: bool
    """Whether it is not known that no batch larger than this one fits."""
    speedup: float | None
    """The winner's speed over this one."""

    def describe(self) -> str:
        """Return ``1.42 × bf16 at the largest batch that fits (64 × 1  bf16: measured)``."""
        how = "measured" if self.is_measured else "predicted"
        what = f"{self.candidate.arm.precision} at {self.batch}"
        return f"{self.speedup:.2f} × {what} ({self.candidate.describe()}: {how})"

    @property
    def batch(self) -> str:
        """The batch in words: the largest that fits, or the largest tried where a larger one may fit."""
        if not self.may_be_larger:
            return "the largest batch that fits"
        return "the largest batch tried" if self.is_measured else "a larger batch"


def expert_of(report: Report) -> Expert | None:
    """Return what an expert would run without a search; ``None`` for ``max-batch``, or without a similar trial."""
    if report.study.request["objective"] != "throughput":
        return None
    tried = _tried_by_experts(report)
    if not tried:
        return None
    fastest = max(tried, key=speed_of)
    bf16 = [t for t in tried if t.candidate.arm.precision == "bf16"]
    of_precision = bf16 or [t for t in tried if t.candidate.arm.precision == fastest.candidate.arm.precision]
    plain = [t for t in of_precision if not t.candidate.arm.gradient_checkpointing] or of_precision
    largest = max(plain, key=lambda t: (t.candidate.per_device_train_batch_size, speed_of(t)))
    best = report.speed(report.best)
    candidate, speed = largest.candidate, speed_of(largest)
    farthest = _FARTHEST * candidate.per_device_train_batch_size
    fits: bool | None = True
    while fits and (larger := _larger(report, candidate)) is not None:
        fits = _may_fit(report, plain, larger) if larger.per_device_train_batch_size <= farthest else None
        predicted = _predicted_speed(plain, larger) if fits else None
        if predicted is None:
            fits = fits and None
        else:
            candidate, speed = larger, predicted
    speedup = best.samples_per_second / speed if best is not None else None
    return Expert(candidate, speed, candidate == largest.candidate, fits is None, speedup)


def _tried_by_experts(report: Report) -> list[Tried]:
    """Return the trials of arms with an expert's settings alone, at the winner's attention and optimizer.

    Those that ran above the line count as well: whoever tries batches until memory runs out leaves no headroom.
    """
    baseline = report.baseline
    like = baseline.candidate.arm if baseline is not None else None

    def is_experts(arm: Arm) -> bool:
        is_alike = like is None or (arm.attn_implementation, arm.optim) == (like.attn_implementation, like.optim)
        return is_alike and not levers_of(arm, _OTHERS) and arm.strategy in (None, "ddp")

    request = report.study.request
    total, world_size = request["effective_batch"], request.get("world_size", 1)

    def is_asked(candidate: Candidate) -> bool:
        """Return whether a candidate has the search's effective batch, unlike some users' own settings."""
        return total is None or candidate.samples_per_step * world_size == total

    # The baseline itself has a batch that nobody chose for its size.
    ran = {t.candidate: t for t in (*report.history.tried, *report.history.believed()) if t.measurement is not None}
    return [t for t in ran.values() if is_experts(t.candidate.arm) and is_asked(t.candidate)]


def _larger(report: Report, candidate: Candidate) -> Candidate | None:
    """Return the candidate at the next larger batch; twice the batch where there is no effective batch."""
    request = report.study.request
    try:
        batches = Batches(
            request["effective_batch"], request["world_size"], request["batch_multiple"], samples=report.samples
        )
    except (InvalidRequestError, KeyError):
        return None
    batch = candidate.per_device_train_batch_size
    if batches.effective_batch is None:
        return replace(candidate, per_device_train_batch_size=2 * batch) if 2 * batch <= batches.most else None
    larger = min((b for level in batches.levels() for b in batches.at_level(level) if b > batch), default=None)
    return Candidate(candidate.arm, larger, batches.accumulation(larger)) if larger is not None else None


def _may_fit(report: Report, tried: Sequence[Tried], larger: Candidate) -> bool | None:
    """Return whether a larger batch is predicted to fit, by a line through two measured peaks.

    ``None`` without two measured peaks.
    """
    if report.history.is_ruled_out(larger):
        return False
    points = _values_by_batch(tried, larger.arm, lambda m: float(m.judged_bytes(larger.arm)))
    if len(points) < 2:
        return None
    (b1, y1), (b2, y2) = points[-2:]
    slope = (y2 - y1) / (b2 - b1)
    return report.ceiling.fits(int(y2 + slope * (larger.per_device_train_batch_size - b2)))


def _predicted_speed(tried: Sequence[Tried], larger: Candidate) -> float | None:
    """Return the predicted speed at a larger batch, by a line through the two largest measured batches.

    ``None`` where the larger batch took no longer: then the difference is noise.
    """
    points = _values_by_batch(tried, larger.arm, lambda m: 1 / m.samples_per_second)
    (b1, s1), (b2, s2) = points[-2:]
    slope = (b2 * s2 - b1 * s1) / (b2 - b1)
    batch = larger.per_device_train_batch_size
    return batch / (b2 * s2 + slope * (batch - b2)) if slope > 0 else None


def _values_by_batch(
    tried: Sequence[Tried], arm: Arm, value: Callable[[Measurement], float]
) -> list[tuple[int, float]]:
    # A batch may be measured with more than one accumulation; the last of them counts.
    points = {
        t.candidate.per_device_train_batch_size: value(t.measurement)
        for t in tried
        if t.candidate.arm == arm and t.measurement is not None
    }
    return sorted(points.items())


_OF_WEIGHTS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


def computed_in(precision: Precision, weight_dtype: str) -> Precision:
    """Return the precision of matrix products with this weight dtype: that of autocast, else of the weights."""
    return precision if precision in ("bf16", "fp16") else _OF_WEIGHTS.get(weight_dtype, precision)


def utilization(report: Report, measured: Measurement, arm: Arm) -> float | None:
    """Return the model FLOPs utilization (MFU) of a step; ``None`` where operations or peak rate are unknown.

    Matrix products, convolutions and attention of both passes count, without padding and recomputation. Where a trial
    could not count them, the count of another trial with the same samples in a batch is used. The peak rate is that of
    the GPU's data sheet in this precision.
    """
    chip, flops = chip_of_device(report.environment["device_name"]), measured.sample_flops
    for trial in report.trials:
        other, its = measurement(trial), trial.candidate.arm
        if flops is None and other is not None and its.sparse_prediction == arm.sparse_prediction:
            flops = other.sample_flops
    if chip is None or chip.rates is None or flops is None:
        return None
    rate = peak_flops(chip.rates, computed_in(arm.precision, report.workload["dtype"]))
    return measured.samples_per_second * flops[1] / (rate * measured.ranks)
