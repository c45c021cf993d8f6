"""Compute the points of a study's charts, for the HTML page and for matplotlib, and plot them with matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import InvalidRequestError
from autotune.core.outcome import OutOfMemory
from autotune.core.units import GIB, MIB, format_bytes, format_rate, format_seconds
from autotune.estimate.pooling import Speed
from autotune.results.report import Report, measurement
from autotune.results.study_view import expert_of
from autotune.results.wording import rate_unit, verdict
from autotune.space.features import how_to_add

Mark = Literal["best", "baseline", "expert"]
"""Why a point is emphasized in a chart."""


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
    """Half the 95 % interval of the speed of its candidate's next run, as a share of that speed."""
    feasible: bool
    mark: Mark | None
    told: str
    """The point in words, for its tooltip."""


@dataclass(frozen=True)
class OverPoint:
    """A candidate that ran out of device memory, which has no speed."""

    arm: int
    """Index of its arm in ``SpeedChart.arms``."""
    candidate: Candidate
    told: str


@dataclass(frozen=True)
class SpeedChart:
    """The chart of speed against memory, with a point for each trial."""

    arms: tuple[Arm, ...]
    """The configurations without their batches, each with a colour and a marker."""
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
        """Whether a linear axis up to the memory ceiling would squeeze all points at its left end."""
        peaks = [point.peak_bytes for point in self.points]
        return bool(peaks) and 0 < max(peaks) < self.cap_bytes / 5 and min(peaks) > 0

    @property
    def leaves_ceiling_out(self) -> bool:
        """Whether the axis ends before the ceiling, since all trials are far below it."""
        return self.is_far_below_ceiling and not self.over

    @property
    def ceiling_words(self) -> str:
        """The label of the memory ceiling, and of the line below it that leaves the headroom."""
        cap = f"ceiling {format_bytes(self.cap_bytes)}"
        if self.leaves_ceiling_out:
            return f"{cap}, far to the right"
        return f"{cap}, {format_bytes(self.line_bytes)} with headroom"

    def limited(self, most: int) -> SpeedChart:
        """Return the chart with about ``most`` points: marked ones, the fastest, and the smallest that ran out."""
        fastest = sorted(self.points, key=lambda point: (point.mark is None, -point.samples_per_second))
        smallest = sorted(self.over, key=lambda over: over.candidate.per_device_train_batch_size)
        return replace(self, points=tuple(fastest[:most]), over=tuple(smallest[: most // 10]))


@dataclass(frozen=True)
class StepRow:
    """The step time of one candidate, pooled over all its processes."""

    candidate: Candidate
    arm: int
    samples: int
    """Number of samples that the time is for: those of an optimizer step, or 1 where steps differ in size."""
    speed: Speed
    mark: Mark | None

    @property
    def seconds(self) -> float:
        """The mean time for these samples."""
        return self.samples / self.speed.samples_per_second

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the next run, in seconds."""
        low, high = self.speed.interval()
        return self.samples / high, self.samples / low

    @property
    def told(self) -> str:
        """The row in words, for its tooltip."""
        (low, high), count = self.interval, self.speed.processes
        return (
            f"{self.candidate.describe()}: {format_seconds(self.seconds)}, next run {format_seconds(low)} to "
            f"{format_seconds(high)} (95 %), measured in {count} process{'' if count == 1 else 'es'}"
        )


def _arms(report: Report) -> tuple[Arm, ...]:
    """Return every tried arm, in the order of the first trials."""
    return tuple(dict.fromkeys(trial.candidate.arm for trial in report.trials))


def _marks(report: Report) -> dict[str | None, Mark]:
    """Return the mark of each marked trial, by its id: ``best``, else ``baseline``, else ``expert``."""
    marks: dict[str | None, Mark] = {}
    expert, best = expert_of(report), report.best
    if expert is not None and expert.is_measured and (best is None or best.candidate != expert.candidate):
        last = [trial.id for trial in report.trials if trial.candidate == expert.candidate and measurement(trial)][-1:]
        marks |= dict.fromkeys(last, "expert")
    # In this order, since a trial can be several of them, and the last one counts.
    return {**marks, report.study.baseline_trial_id: "baseline", report.study.best_trial_id: "best"}


def speed_chart(report: Report) -> SpeedChart:
    """Return the chart of speed against memory: completed trials, and candidates that ran out of device memory."""
    arms, marks, unit = _arms(report), _marks(report), rate_unit(report.workload)
    points, over = [], {}
    for trial in report.trials:
        arm, measured, words = arms.index(trial.candidate.arm), measurement(trial), trial.candidate.describe()
        if measured is not None:
            mark, speed = marks.get(trial.id), report.speed(trial)
            if mark is not None:
                # A marked trial has the speed and peak of all processes of its candidate, as everywhere.
                measured = report.pooled(trial) or measured
            peak, rate = measured.judged_bytes(trial.candidate.arm), measured.samples_per_second
            words += f": {format_rate(rate)} {unit}, peak {format_bytes(peak)}; {verdict(report, trial)}"
            spread = speed.relative_half_width if speed is not None else None
            fits, told = report.feasible(trial), f"trial {trial.number}, {words}"
            points.append(SpeedPoint(arm, trial.candidate, peak, rate, spread, fits, mark, told))
        elif isinstance(trial.outcome, OutOfMemory) and trial.outcome.where == "device":
            told = f"trial {trial.number}, {words}: out of memory"
            over[trial.candidate] = OverPoint(arm, trial.candidate, told)
    ceiling = report.ceiling
    return SpeedChart(arms, tuple(points), tuple(over.values()), ceiling.cap_bytes, ceiling.line_bytes, unit)


def step_rows(report: Report) -> list[StepRow]:
    """Return the pooled step times of every candidate that fits, and of marked trials that completed, fastest first.

    Without a given effective batch, steps differ in size, so times are those of a sample.
    """
    arms, marks = _arms(report), _marks(report)
    is_per_sample = report.study.request["effective_batch"] is None
    last = {trial.candidate: trial for trial in report.trials if measurement(trial) is not None}
    marked = {trial.candidate: mark for trial_id, mark in marks.items() if (trial := report.trial(trial_id))}
    rows = []
    for candidate in dict.fromkeys([*(tried.candidate for tried in report.history.believed()), *marked]):
        speed = report.speed(last.get(candidate))
        if speed is not None:
            samples = 1 if is_per_sample else candidate.samples_per_step
            rows.append(StepRow(candidate, arms.index(candidate.arm), samples, speed, marked.get(candidate)))
    return sorted(rows, key=lambda row: row.seconds)


_MARKERS = "os^Dp"


def plot_trials(report: Report) -> Any:
    """Plot samples a second against peak memory with a marker for each trial and a line for each arm.

    Returns the matplotlib ``Axes`` of a new figure. Raises ``InvalidRequestError`` where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequestError("a plot needs matplotlib, which is not installed", how_to_add("plot"))
    axes = importlib.import_module("matplotlib.pyplot").subplots(layout="constrained")[1]
    chart = speed_chart(report)
    axis_end = max((p.peak_bytes for p in chart.points), default=0) if chart.leaves_ceiling_out else chart.cap_bytes
    unit, name = (GIB, "GiB") if axis_end >= 2 * GIB else (MIB, "MiB")
    for number in range(len(chart.arms)):
        _plot_arm(axes, chart, number, unit)
    if chart.leaves_ceiling_out:
        # Nothing is drawn, but the legend names the ceiling.
        axes.plot([], [], linestyle="", label=chart.ceiling_words)
    else:
        axes.axvline(chart.cap_bytes / unit, color="tab:red", label=chart.ceiling_words)
        axes.axvspan(chart.line_bytes / unit, chart.cap_bytes / unit, color="tab:red", alpha=0.1, linewidth=0)
    for point in chart.points:
        if point.mark is not None:
            place = point.peak_bytes / unit, point.samples_per_second
            axes.plot([place[0]], [place[1]], marker="o", markersize=14, fillstyle="none", color="black", linestyle="")
            words = {"xytext": (-10, 8), "textcoords": "offset points", "ha": "right", "weight": "bold"}
            axes.annotate(str(point.mark), place, **words)
    if chart.is_far_below_ceiling and chart.over:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    fastest = max((point.samples_per_second for point in chart.points), default=1.0)
    axes.set_ylim(0, 1.12 * fastest)
    axes.set_xlabel(f"peak memory ({name}); × at the ceiling: out of memory")
    axes.set_ylabel(chart.rate_unit)
    axes.set_title(f"{report.study.name}, {report.environment['device_name']}")
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return axes


def _plot_arm(axes: Any, chart: SpeedChart, number: int, unit: int) -> None:
    """Plot the trials of one arm in order of batch, with hollow markers below the required headroom."""
    points = sorted((p for p in chart.points if p.arm == number), key=lambda p: p.candidate.per_device_train_batch_size)
    line = axes.errorbar(
        [point.peak_bytes / unit for point in points],
        [point.samples_per_second for point in points],
        yerr=[point.samples_per_second * (point.relative_spread or 0.0) for point in points],
        marker=_MARKERS[number % len(_MARKERS)],
        linewidth=1,
        markersize=5,
        capsize=3,
        label=chart.arms[number].describe(),
    )
    color = line[0].get_color()
    hollow = [point for point in points if not point.feasible]
    axes.plot(
        [point.peak_bytes / unit for point in hollow],
        [point.samples_per_second for point in hollow],
        linestyle="",
        marker=_MARKERS[number % len(_MARKERS)],
        color=color,
        markersize=5,
        markerfacecolor="white",
        zorder=3,
    )
    # Candidates that ran out have no speed: they are stacked at the ceiling, at shares of the height of the axes.
    heights = [0.03 * (place + 1) for place, over in enumerate(chart.over) if over.arm == number]
    axes.plot(
        [chart.cap_bytes / unit] * len(heights),
        heights,
        linestyle="",
        marker="x",
        color=color,
        transform=axes.get_xaxis_transform(),
    )
