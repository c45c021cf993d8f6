"""Derive from a study's record the values that text, JSON and HTML show; compare its winner with an expert's settings.

The expert's settings are bf16 at the largest batch that fits and nothing else, with activations recomputed where
nothing fits without; where there is no bf16, the fastest precision. What ran within the memory limit fits an expert.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.candidate import OF_RANKS, Arm, Candidate
from autotune.core.device import Precision
from autotune.core.errors import InvalidRequestError
from autotune.core.outcome import Completed, Measurement
from autotune.core.statistics import difference
from autotune.core.units import format_deviation, format_groups, is_lopsided
from autotune.devices.gpus import chip_of_device
from autotune.estimate.bottleneck import Limit, describe_limit, what_limits
from autotune.estimate.history import Tried, batch_of, speed_of
from autotune.estimate.pooling import Speed
from autotune.estimate.step_time import peak_flops
from autotune.results.report import Report, measurement
from autotune.results.warnings import notes
from autotune.results.wording import detail_lines, rate_unit, run_lines, verdict
from autotune.space.arms import levers_of
from autotune.space.levers import LEVERS
from autotune.space.space import Batches
from autotune.store.records import TrialRecord

# Settings that an expert chooses, or that follow from the model and the GPUs.
_CHOSEN = frozenset(("precision", "gradient_checkpointing", "attn_implementation", "optim", *OF_RANKS))
_OTHERS = frozenset(row.name for row in LEVERS) - _CHOSEN
# Peak and speed are predicted for batches of up to so many times the largest that was measured. A choice.
_FARTHEST = 4


@dataclass(frozen=True, slots=True)
class Expert:
    """The settings that an expert would train with, without a search, and their speed."""

    candidate: Candidate
    samples_per_second: float
    is_measured: bool
    """Whether a trial measured them; else their batch is larger than any tried one, and their speed is predicted."""
    may_be_larger: bool
    """Whether a larger batch than this one may fit, too."""
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
    """Return what an expert would run without a search; ``None`` for ``max-batch``, or without a similar trial.

    This is the largest batch of similar trials in bf16. If larger ones are not known to fail, peak and step time are
    extrapolated from the measured batches, up to the largest batch whose peak is below the line.
    """
    if report.study.request["objective"] != "throughput":
        return None
    tried = _tried_by_experts(report)
    if not tried:
        return None
    preferred = max(tried, key=lambda t: (t.candidate.arm.precision == "bf16", speed_of(t))).candidate.arm.precision
    of_precision = [t for t in tried if t.candidate.arm.precision == preferred]
    plain = [t for t in of_precision if not t.candidate.arm.gradient_checkpointing] or of_precision
    largest = max(plain, key=lambda t: (t.candidate.per_device_train_batch_size, speed_of(t)))
    candidate, speed, may_be_larger = largest.candidate, speed_of(largest), False
    farthest_batch = _FARTHEST * candidate.per_device_train_batch_size
    # Of trials with the same batch but other accumulations, the last counts.
    measured = {batch_of(t): t.measurement for t in plain if t.candidate.arm == candidate.arm}
    peaks = sorted((batch, each.judged_bytes(candidate.arm)) for batch, each in measured.items() if each is not None)
    times = sorted((batch, batch / each.samples_per_second) for batch, each in measured.items() if each is not None)
    while (larger := _at_larger_batch(report, candidate)) is not None and report.history.ruled_out_by(larger) is None:
        batch = larger.per_device_train_batch_size
        is_predictable = len(peaks) > 1 and batch <= farthest_batch
        if is_predictable and not report.ceiling.bounds.fits(int(_extrapolated(peaks, batch))):
            break
        # A larger batch that would take no longer is not believed: its times differ by noise.
        if not is_predictable or (seconds := _extrapolated(times, batch)) <= times[-1][1]:
            may_be_larger = True
            break
        candidate, speed = larger, batch / seconds
    best = report.speed(report.best)
    speedup = best.samples_per_second / speed if best is not None else None
    return Expert(candidate, speed, candidate == largest.candidate, may_be_larger, speedup)


def _tried_by_experts(report: Report) -> list[Tried]:
    """Return a trial of each candidate that has only an expert's settings, with the baseline's attention and optimizer.

    Trials with a peak above the line count as well: whoever tries batches until memory runs out leaves no headroom.
    """
    baseline, request = report.baseline, report.study.request
    usual = baseline.candidate.arm if baseline is not None else None
    total, world_size = request["effective_batch"], request.get("world_size", 1)

    def is_experts(candidate: Candidate) -> bool:
        """Return whether a candidate has no setting that an expert would not choose."""
        arm = candidate.arm
        is_usual = usual is None or (arm.attn_implementation, arm.optim) == (usual.attn_implementation, usual.optim)
        # A baseline of the user's own settings may have another effective batch than the search.
        is_asked = total is None or candidate.samples_per_step * world_size == total
        return is_usual and is_asked and not levers_of(arm, _OTHERS) and arm.strategy in (None, "ddp")

    ran = {t.candidate: t for t in (*report.history.tried, *report.history.believed()) if t.measurement is not None}
    return [tried for tried in ran.values() if is_experts(tried.candidate)]


def _at_larger_batch(report: Report, candidate: Candidate) -> Candidate | None:
    """Return the candidate at the next larger batch that the search allows, or twice its batch; else ``None``."""
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


def _extrapolated(points: Sequence[tuple[int, float]], batch: int) -> float:
    """Return the value at a larger batch, by a line through the last two ``points`` (batch, value)."""
    (b1, y1), (b2, y2) = points[-2:]
    return y2 + (y2 - y1) / (b2 - b1) * (batch - b2)


_OF_WEIGHTS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


def computed_in(precision: Precision, weight_dtype: str) -> Precision:
    """Return the precision that matrix products are computed in: that of autocast, else of the weights in 16 bits."""
    return precision if precision in ("bf16", "fp16") else _OF_WEIGHTS.get(weight_dtype, precision)


def utilization(report: Report, measured: Measurement, arm: Arm) -> float | None:
    """Return the model FLOPs utilization (MFU) of a step; ``None`` where operations or peak rate are unknown.

    Matrix products, convolutions and attention of both passes count, without padding and recomputation. Where a trial
    could not count them, as with compiled code, the count of another trial is used, with the same ``sparse_prediction``
    (logits of labelled tokens only). The peak rate is that of the GPU's data sheet in this precision.
    """
    chip = chip_of_device(report.environment["device_name"])
    alike = (measurement(t) for t in report.trials if t.candidate.arm.sparse_prediction == arm.sparse_prediction)
    counts = (each.sample_flops for each in (measured, *alike) if each is not None)
    flops = next((count for count in counts if count is not None), None)
    if chip is None or chip.rates is None or flops is None:
        return None
    rate = peak_flops(chip.rates, computed_in(arm.precision, report.workload["dtype"]))
    return measured.samples_per_second * flops[1] / (rate * measured.ranks)


@dataclass(frozen=True)
class TrialView:
    """A trial with the values to show of it."""

    record: TrialRecord
    measured: Measurement | None
    """``None`` where it did not complete. Of the best and the baseline it is pooled over all processes of the
    candidate."""
    is_feasible: bool
    """Whether it completed with its peak at or under the line."""
    tokens_per_second: float | None
    """Without padding; ``None`` where samples are not text."""
    headroom_bytes: int | None
    """Bytes that its peak left free below the cap (torch's limit); with expandable segments, at least so many."""
    limit: Limit | None
    """What limits its step. The GPU's share may have been measured in another trial of the candidate."""
    verdict: str
    """Why it failed, or its speed-up over the baseline."""

    @property
    def candidate(self) -> Candidate:
        """The settings of the trial."""
        return self.record.candidate


@dataclass(frozen=True)
class BestView(TrialView):
    """The winner, or the trial that leads while a search runs."""

    measured: Measurement
    limit: Limit
    setting: str
    """``per-device batch 32 × accumulation 2 × 4 devices, bf16``."""
    speed: Speed
    """The pooled speed, with the 95 % interval of the next run."""
    runner_up: str | None
    """The comparison with the fastest candidate besides the best and the baseline; ``None`` without one."""
    limit_words: str | None
    """What limits a step, in words; ``None`` where it was not measured how long the GPU computes."""
    utilization: float | None
    """Share of the GPU's rated arithmetic that a step uses; ``None`` where it is not known."""
    peak_bytes: int
    """What is compared with the cap: reserved memory, or allocated memory with expandable segments."""
    run: tuple[str, ...]
    """Sentences on the user's whole run: how long it takes, what new batch shapes cost."""
    details: tuple[str, ...]
    """Sentences about energy, data, the boundary of the largest batch."""


@dataclass(frozen=True)
class StudyView:
    """A study with the trials, comparison and notes to show of it, each derived when it is first asked for."""

    report: Report

    @functools.cached_property
    def best(self) -> BestView | None:
        """The winner, with speed and peaks pooled over all processes of its candidate."""
        return _best_view(self.report, self.report.best) if self.report.best is not None else None

    @functools.cached_property
    def baseline(self) -> TrialView | None:
        """The baseline, with speed and peaks pooled over all its processes; ``None`` where it was not run."""
        baseline = self.report.baseline
        return trial_view(self.report, _with_all_processes(self.report, baseline)) if baseline is not None else None

    @functools.cached_property
    def expert(self) -> Expert | None:
        """bf16 at the largest batch that fits; ``None`` where no similar trial completed."""
        return expert_of(self.report)

    @functools.cached_property
    def trials(self) -> tuple[TrialView, ...]:
        """All trials in order, each with its own measurement."""
        return tuple(trial_view(self.report, trial) for trial in self.report.trials)

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes on the validity of the numbers, most important first."""
        return tuple(notes(self.report))


def trial_view(report: Report, trial: TrialRecord) -> TrialView:
    """Return the values to show for one trial."""
    measured = measurement(trial)
    limit = headroom_bytes = None
    if measured is not None:
        headroom_bytes = report.ceiling.cap_bytes - measured.peak_reserved_bytes
        if trial.candidate.arm.expandable_segments:
            # It could reserve no more than the line, so at least the headroom was left.
            headroom_bytes = report.ceiling.headroom_bytes
        share = measured.gpu_busy_share or report.history.pool.busy_share(trial.candidate)
        limit = what_limits(replace(measured, gpu_busy_share=share))
    return TrialView(
        record=trial,
        measured=measured,
        is_feasible=report.feasible(trial),
        tokens_per_second=report.tokens_per_second(measured),
        headroom_bytes=headroom_bytes,
        limit=limit,
        verdict=verdict(report, trial),
    )


def _with_all_processes(report: Report, trial: TrialRecord) -> TrialRecord:
    """Return a trial; if it completed, with speed and peaks pooled over all processes of its candidate."""
    pooled = report.pooled(trial)
    if pooled is None or not isinstance(trial.outcome, Completed):
        return trial
    return replace(trial, outcome=replace(trial.outcome, measurement=pooled))


def _best_view(report: Report, best: TrialRecord) -> BestView | None:
    """Return the values to show for the winner; ``None`` where it was not measured."""
    shown = trial_view(report, _with_all_processes(report, best))
    measured, limit, speed, candidate = shown.measured, shown.limit, report.speed(best), best.candidate
    if measured is None or limit is None or speed is None:
        return None
    world_size = report.study.request["world_size"]
    setting = (
        f"per-device batch {candidate.per_device_train_batch_size} × accumulation "
        f"{candidate.gradient_accumulation_steps}"
        + (f" × {format_groups(world_size, candidate.arm.context_parallel)}" if world_size > 1 else "")
        + f", {candidate.arm.describe()}"
    )
    common: dict[str, Any] = {**vars(shown), "measured": measured, "limit": limit}
    return BestView(
        **common,
        setting=setting,
        speed=speed,
        runner_up=_runner_up(report, candidate, speed),
        limit_words=describe_limit(candidate, measured),
        utilization=utilization(report, measured, candidate.arm),
        peak_bytes=measured.judged_bytes(candidate.arm),
        run=tuple(run_lines(measured, candidate, rate_unit(report.workload), speed, _compared_with(report))),
        details=tuple(detail_lines(report, best, measured)),
    )


def _compared_with(report: Report) -> tuple[str, float] | None:
    """Return name and speed of the settings to compare the run with: an expert's, else the baseline's, if any."""
    expert = expert_of(report) if report.workload["task"] != "own" else None
    if expert is not None and report.best is not None and expert.candidate != report.best.candidate:
        return f"{expert.candidate.arm.precision} at {expert.batch}", expert.samples_per_second
    own = report.speed(report.baseline)
    return (report.baseline_name, own.samples_per_second) if own is not None and not report.is_own_best else None


def _runner_up(report: Report, best: Candidate, best_speed: Speed) -> str | None:
    """Compare the winner with the fastest other candidate but the baseline; ``None`` without one, or for ``max-batch``.

    Return ``1.04 ± 0.02 × the next fastest (64 × 1 bf16)``. If noise hides which is faster, ``: not distinguishable``
    follows, and if the other was measured to be faster, why the winner is preferred.
    """
    if report.study.request["objective"] != "throughput":
        return None
    left_out = {best} if report.baseline is None else {best, report.baseline.candidate}
    others = [tried.candidate for tried in report.history.believed() if tried.candidate not in left_out]
    speeds = [(speed, each) for each in others if (speed := report.history.speed(each)) is not None]
    if not speeds:
        return None
    speed, candidate = max(speeds, key=lambda pair: pair[0].samples_per_second)
    gain = difference(speed.log_sample_seconds, best_speed.log_sample_seconds)
    # ``gain`` is a difference of logarithms, so its exponential is a ratio of speeds.
    half_width, ratio = gain.half_width(), math.exp(gain.mean)
    factor, other = math.exp(half_width), f"the next fastest ({candidate.describe()})"
    words = f"{ratio:.2f} ± {ratio * half_width:.2f} × {other}"
    if is_lopsided(1, 1 / factor, factor):
        words = f"{ratio:.2f} × {other}, give or take {format_deviation(half_width)}"
    if abs(gain.mean) > half_width:
        return words
    words += ": not distinguishable"
    if speed.samples_per_second > best_speed.samples_per_second:
        words += ", and your own settings need no change" if report.is_own_best else ", and the best is plainer"
    return words
