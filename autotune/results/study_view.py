"""Derive what is shown of a study from its record; text, JSON, pages and the Python API print this."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.outcome import Completed, Measurement
from autotune.core.statistics import difference
from autotune.core.units import format_deviation, format_groups, is_lopsided
from autotune.estimate.bottleneck import Limit, describe_limit, what_limits
from autotune.estimate.pooling import Speed
from autotune.results.expert import Expert, expert_of, utilization
from autotune.results.report import Report, measurement
from autotune.results.warnings import notes
from autotune.results.wording import (
    counted_in,
    counts_line,
    detail_lines,
    rate_unit,
    run_lines,
    searched_lines,
    verdict,
)
from autotune.store.records import StudyRecord, TrialRecord


@dataclass(frozen=True)
class TrialView:
    """A trial."""

    record: TrialRecord
    measured: Measurement | None
    """``None`` where it did not complete. Of the best and the baseline: speed and peaks of all processes of its
    candidate."""
    is_feasible: bool
    """Whether it completed with its peak at or under the line."""
    tokens_per_second: float | None
    """Without padding; ``None`` where samples are not text."""
    headroom_bytes: int | None
    """Bytes of the cap that it left free; with expandable segments, at least so many."""
    limit: Limit | None
    """What limits its step. The GPU's share may have been measured in another trial of the candidate."""
    verdict: str
    """Why it failed, or its speed-up over the baseline."""

    @property
    def candidate(self) -> Candidate:
        """The settings of the trial."""
        return self.record.candidate


@dataclass(frozen=True)
class RunnerUp:
    """The fastest candidate besides the best and the baseline."""

    candidate: Candidate
    ratio: float
    """The speed of the best over its speed."""
    log_half_width: float
    """Half the 95 % interval of the ratio's logarithm."""
    is_told_apart: bool
    """Whether the interval leaves out 1."""
    preferred: str
    """Why the best is preferred, where this was measured to be faster; empty where it was not."""

    def describe(self) -> str:
        """Return the comparison in words: ``1.04 ± 0.02 × the next fastest (64 × 1 bf16)``."""
        factor, other = math.exp(self.log_half_width), f"the next fastest ({self.candidate.describe()})"
        words = f"{self.ratio:.2f} ± {self.ratio * self.log_half_width:.2f} × {other}"
        if is_lopsided(1, 1 / factor, factor):
            words = f"{self.ratio:.2f} × {other}, give or take {format_deviation(self.log_half_width)}"
        if self.is_told_apart:
            return words
        return f"{words}: not distinguishable" + (f", and {self.preferred}" if self.preferred else "")


@dataclass(frozen=True)
class BestView(TrialView):
    """The winner, or the trial that leads while a search runs."""

    measured: Measurement
    limit: Limit
    setting: str
    """``per-device batch 32 × accumulation 2 × 4 devices, bf16``."""
    speed: Speed
    """With the 95 % interval of the next run."""
    runner_up: RunnerUp | None
    limit_words: str | None
    """``None`` where the GPU's share was not measured."""
    utilization: float | None
    """Share of the GPU's rated arithmetic that a step uses; ``None`` where it is not known."""
    peak_bytes: int
    """What is compared with the cap: reserved memory, or allocated memory with expandable segments."""
    run: tuple[str, ...]
    """Sentences about the run that the speed is of: how long it takes, what new shapes cost."""
    details: tuple[str, ...]
    """Sentences about energy, data, the boundary of the largest batch."""


@dataclass(frozen=True)
class StudyView:
    """A study's record with what is derived from it, each when it is first asked for."""

    report: Report

    @property
    def record(self) -> StudyRecord:
        """The study."""
        return self.report.study

    @functools.cached_property
    def searched(self) -> tuple[str, str, str]:
        """Three lines: the model; the data and the batch; the device and the versions."""
        return searched_lines(self.report)

    @property
    def counts(self) -> str:
        """A line on the number of trials, their outcomes, the duration and the reason for the end."""
        return counts_line(self.report)

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
    def baseline_speed(self) -> Speed | None:
        """The baseline's pooled speed; ``None`` where it did not complete."""
        return self.report.speed(self.report.baseline)

    @functools.cached_property
    def speedup(self) -> float | None:
        """The winner's speed over the baseline's; ``None`` where either is missing."""
        return self.report.speedup()

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

    @property
    def sample_word(self) -> str:
        """The unit of a batch: ``sample`` or ``row``."""
        return counted_in(self.report.workload)

    @property
    def rate_unit(self) -> str:
        """``samples/s``, or ``rows/s`` where samples are packed in rows."""
        return rate_unit(self.report.workload)


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
    """Return a completed trial with speed and peaks pooled over all processes of its candidate."""
    pooled = report.pooled(trial)
    if pooled is None or not isinstance(trial.outcome, Completed):
        return trial
    return replace(trial, outcome=replace(trial.outcome, measurement=pooled))


def _best_view(report: Report, best: TrialRecord) -> BestView | None:
    """Return the values to show for the winner."""
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
    """Return name and speed of the settings without a search: the user's own, or an expert's."""
    expert = expert_of(report) if report.workload["task"] != "own" else None
    if expert is not None and report.best is not None and expert.candidate != report.best.candidate:
        return f"{expert.candidate.arm.precision} at {expert.batch}", expert.samples_per_second
    own = report.speed(report.baseline)
    return (report.baseline_name, own.samples_per_second) if own is not None and not report.is_own_best else None


def _runner_up(report: Report, best: Candidate, own: Speed) -> RunnerUp | None:
    """Compare the winner with the fastest other candidate.

    ``None`` without others, or for ``max-batch``.
    """
    if report.study.request["objective"] != "throughput":
        return None
    compared = {best, report.baseline.candidate if report.baseline is not None else best}
    others = [tried.candidate for tried in report.history.believed() if tried.candidate not in compared]
    speeds = [(speed, each) for each in others if (speed := report.history.speed(each)) is not None]
    if not speeds:
        return None
    speed, candidate = max(speeds, key=lambda pair: pair[0].samples_per_second)
    gain = difference(speed.log_sample_seconds, own.log_sample_seconds)
    half_width = gain.half_width()
    preferred = ""
    if speed.samples_per_second > own.samples_per_second:
        preferred = "your own settings need no change" if report.is_own_best else "the best is plainer"
    return RunnerUp(candidate, math.exp(gain.mean), half_width, abs(gain.mean) > half_width, preferred)
