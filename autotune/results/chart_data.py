"""Collect the data of a study's charts, for the HTML page and for matplotlib."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Measurement, OutOfMemory
from autotune.core.units import format_bytes, format_rate, format_seconds
from autotune.results.expert import expert_of
from autotune.results.report import Report, measurement
from autotune.results.wording import rate_unit, verdict
from autotune.store.records import TrialRecord

Mark = Literal["best", "baseline", "expert"]


@dataclass(frozen=True)
class SpeedPoint:
    """A completed trial in the chart of speed against memory."""

    arm: int
    """Index of its arm in ``SpeedChart.arms``."""
    candidate: Candidate
    peak_bytes: int
    """The peak that is compared with the ceiling: reserved memory, or allocated memory with expandable segments."""
    samples_per_second: float
    relative_spread: float | None
    """Half the 95 % interval of the speed of its candidate's next run, relative to it."""
    feasible: bool
    mark: Mark | None
    told: str
    """The point in words."""


@dataclass(frozen=True)
class OverPoint:
    """A candidate that ran out of device memory. It has no speed."""

    arm: int
    candidate: Candidate
    told: str


@dataclass(frozen=True)
class SpeedChart:
    """The chart of speed against memory, with a point for each trial."""

    arms: tuple[Arm, ...]
    points: tuple[SpeedPoint, ...]
    over: tuple[OverPoint, ...]
    cap_bytes: int
    """Most bytes that a trial may reserve."""
    line_bytes: int
    """Most bytes that a feasible trial may reserve: the cap less the headroom."""
    rate_unit: str
    """Of the speed: ``samples/s`` or ``rows/s``."""

    @property
    def is_far_below_ceiling(self) -> bool:
        """Whether all peaks would be at the left end of a linear axis up to the ceiling."""
        peaks = [point.peak_bytes for point in self.points]
        return bool(peaks) and 0 < max(peaks) < self.cap_bytes / 5 and min(peaks) > 0

    @property
    def leaves_ceiling_out(self) -> bool:
        """Whether the ceiling is so far from all trials, of which none reached it, that an axis to it shows nothing."""
        return self.is_far_below_ceiling and not self.over

    def limited(self, most: int) -> SpeedChart:
        """Return the chart with about ``most`` marks: the fastest trials, and the smallest batches that ran out."""
        fastest = sorted(self.points, key=lambda point: (point.mark is None, -point.samples_per_second))
        smallest = sorted(self.over, key=lambda over: over.candidate.per_device_train_batch_size)
        return replace(self, points=tuple(fastest[:most]), over=tuple(smallest[: most // 10]))


@dataclass(frozen=True)
class StepRow:
    """The step time of one candidate, pooled over all its processes."""

    candidate: Candidate
    arm: int
    seconds: float
    low_seconds: float
    high_seconds: float
    """The 95 % interval of the next run."""
    relative_half_width: float
    """Half of that interval, relative to the mean."""
    processes: int
    mark: Mark | None

    @property
    def told(self) -> str:
        """The row in words, shown as its tooltip."""
        return (
            f"{self.candidate.describe()}: {format_seconds(self.seconds)}, next run {format_seconds(self.low_seconds)} "
            f"to {format_seconds(self.high_seconds)} (95 %), measured in {self.processes} "
            f"process{'' if self.processes == 1 else 'es'}"
        )


@dataclass(frozen=True)
class StepChart:
    """The step times of candidates that fit, fastest first."""

    per_sample: bool
    """Whether times are a sample rather than a step: with a free effective batch, steps differ in size."""
    rows: tuple[StepRow, ...]


def arms_of(report: Report) -> tuple[Arm, ...]:
    """Return every arm that was tried, in the order of the first trials."""
    return tuple(dict.fromkeys(trial.candidate.arm for trial in report.trials))


def speed_chart(report: Report) -> SpeedChart:
    """Return the chart of completed trials, and of each candidate that ran out of memory once."""
    arms = arms_of(report)
    points, over = [], {}
    for trial in report.trials:
        arm, measured = arms.index(trial.candidate.arm), measurement(trial)
        if measured is not None:
            points.append(_speed_point(report, trial, measured, arm))
        elif isinstance(trial.outcome, OutOfMemory) and trial.outcome.where == "device":
            words = f"trial {trial.number}, {trial.candidate.describe()}: out of memory"
            over[trial.candidate] = OverPoint(arm, trial.candidate, words)
    return SpeedChart(
        arms,
        tuple(points),
        tuple(over.values()),
        report.ceiling.cap_bytes,
        report.ceiling.line_bytes,
        rate_unit(report.workload),
    )


def _speed_point(report: Report, trial: TrialRecord, measured: Measurement, arm: int) -> SpeedPoint:
    mark = _mark(report, trial.id)
    pooled = report.speed(trial)
    if mark is not None:
        # Of all its processes, as everywhere.
        measured = report.pooled(trial) or measured
    peak, speed = measured.judged_bytes(trial.candidate.arm), measured.samples_per_second
    words = (
        f"trial {trial.number}, {trial.candidate.describe()}: {format_rate(speed)} "
        f"{rate_unit(report.workload)}, peak {format_bytes(peak)}; {verdict(report, trial)}"
    )
    return SpeedPoint(
        arm,
        trial.candidate,
        peak,
        speed,
        pooled.relative_half_width if pooled is not None else None,
        report.feasible(trial),
        mark,
        words,
    )


def _mark(report: Report, trial_id: str | None) -> Mark | None:
    if trial_id is None:
        return None
    expert = expert_of(report)
    marks: dict[str | None, Mark] = {}
    if expert is not None and expert.is_measured and (report.best is None or report.best.candidate != expert.candidate):
        last = [trial.id for trial in report.trials if trial.candidate == expert.candidate and measurement(trial)][-1:]
        marks = dict.fromkeys(last, "expert")
    marks |= {report.study.baseline_trial_id: "baseline", report.study.best_trial_id: "best"}
    return marks.get(trial_id)


def step_chart(report: Report) -> StepChart:
    """Return the pooled step times of every candidate that fits, and of the baseline if it completed."""
    arms = arms_of(report)
    per_sample = report.study.request["effective_batch"] is None
    expert = expert_of(report)
    marks: dict[Candidate, Mark] = {expert.candidate: "expert"} if expert is not None and expert.is_measured else {}
    for trial, mark in ((report.baseline, "baseline"), (report.best, "best")):
        if trial is not None and report.speed(trial) is not None:
            marks[trial.candidate] = "best" if mark == "best" else "baseline"
    last = {trial.candidate: trial for trial in report.trials if measurement(trial) is not None}
    candidates = dict.fromkeys([*(tried.candidate for tried in report.history.believed()), *marks])
    rows = []
    for candidate in candidates:
        speed = report.speed(last.get(candidate))
        if speed is None:
            continue
        samples = 1 if per_sample else candidate.samples_per_step
        low, high = speed.interval()
        rows.append(
            StepRow(
                candidate,
                arms.index(candidate.arm),
                samples / speed.samples_per_second,
                samples / high,
                samples / low,
                speed.relative_half_width,
                speed.processes,
                marks.get(candidate),
            )
        )
    return StepChart(per_sample, tuple(sorted(rows, key=lambda row: row.seconds)))
