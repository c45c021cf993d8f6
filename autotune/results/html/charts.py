"""Draw the charts of a study: speed against memory, values with intervals, stacked bars.

A drawing is as wide as its page: places across it are per cent of its width, so that text has the same size on every
screen. Colours are CSS classes of the page (``s0`` to ``s7``), so that one drawing serves light and dark.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from autotune.core.units import GIB, MIB, format_bytes, format_next_run, format_rate
from autotune.results.chart_data import SpeedChart, SpeedPoint, StepChart, StepRow
from autotune.results.html.markup import environment

COLORS = 8
# Corners of the marks and the turn of the first one, in turns; the mark without corners is a circle.
_SHAPES = ((0, 0.0), (4, 1 / 8), (3, 0.0), (4, 0.0), (5, 0.0))
_PLOT_HEIGHT = 320.0
_ROW_HEIGHT = 20.0
_BAR_HEIGHT = 44.0
# As many labels of an axis as a phone has room for.
_TICKS_ACROSS = 5
_TICKS_UP = 6


@dataclass(frozen=True)
class Scale:
    """A map from values to shares of an axis."""

    low: float
    high: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1. Values outside are clipped."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Return round values within the scale, about ``most`` of them at most."""
        ticks: list[float] = []
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
                every = (factor * 10.0**power for power in powers for factor in factors)
                finer = [tick for tick in every if self.low <= tick <= self.high]
                if len(finer) > most:
                    break
                ticks = finer
        # Within part of a decade, linear ticks are as good as logarithmic ones.
        if len(ticks) > 2:
            return ticks
        raw = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def series_class(number: int) -> str:
    """Return the CSS class of a colour."""
    return f"s{number % COLORS}"


def _corners(number: int, size: float) -> str | None:
    """Return the corners of an arm's marker as SVG points around the origin; ``None`` for a circle."""
    corners, first = _SHAPES[number % len(_SHAPES)]
    turns = [2 * math.pi * (first + corner / corners) for corner in range(corners)]
    return " ".join(f"{1.25 * size * math.sin(t):.2f},{-1.25 * size * math.cos(t):.2f}" for t in turns) or None


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


@functools.cache
def drawings() -> Any:
    """Return the drawing macros of the template ``charts.html``."""
    known = {"series": series_class, "corners": _corners, "percent": _percent, "px": _pixels}
    return environment().get_template("charts.html", globals=known).module


def _ticks(across: Scale) -> list[tuple[float, str]]:
    """Return positions and labels of the ticks of an axis."""
    return [(across(tick), f"{tick:,g}") for tick in across.ticks(_TICKS_ACROSS)]


def _axis_label(across: Scale, label: str) -> str:
    """Return the label of an axis, with ``logarithmic`` inside the brackets of its unit where needed."""
    log = ", logarithmic" if across.is_log else ""
    return f"{label.removesuffix(')')}{log}{')' if label.endswith(')') else ''}"


def draw_speed_chart(chart: SpeedChart, key: str) -> Markup:
    """Draw speed against peak memory: a mark for each trial, the ceiling, ``×`` for out of memory."""
    height = _PLOT_HEIGHT
    unit, name = (GIB, "GiB") if _memory_scale(chart, 1).high >= 2 * GIB else (MIB, "MiB")
    across = _memory_scale(chart, unit)
    up = Scale(0.0, 1.12 * max((point.samples_per_second for point in chart.points), default=1.0))
    cap, line = across(chart.cap_bytes / unit), across(chart.line_bytes / unit)
    # The winner and the baseline come last, so that no other mark covers them.
    ordered = sorted(chart.points, key=lambda point: point.mark is not None)
    placed = [(p, across(p.peak_bytes / unit), height * (1 - up(p.samples_per_second))) for p in ordered]
    ticks = [(height * (1 - up(tick)), f"{tick:,g}") for tick in (up.ticks(_TICKS_UP) if placed else [])]
    # Candidates that ran out have no speed. They are stacked at the ceiling.
    over = sorted(chart.over, key=lambda each: (each.candidate.per_device_train_batch_size, each.arm))
    spacing = min(14.0, (height - 20) / max(1, len(over)))
    words = (
        f"{len(chart.points)} completed trials by peak memory and {chart.rate_unit}; ceiling "
        f"{format_bytes(chart.cap_bytes)}; {len(chart.over)} candidates ran out of memory. The table of trials has "
        "all values."
    )
    drawn: Markup = drawings().speeds(
        key,
        words,
        height,
        _ticks(across),
        _axis_label(across, f"peak memory ({name})"),
        ticks,
        chart,
        line,
        cap,
        [join for arm in range(len(chart.arms)) for join in _joins(arm, placed)],
        [(each, height - 9 - spacing * place) for place, each in enumerate(over)],
        placed,
    )
    return drawn


def _memory_scale(chart: SpeedChart, unit: int) -> Scale:
    """Return the memory axis: linear to beyond the ceiling, or logarithmic where points would be squeezed.

    Where no trial came near the ceiling, the axis ends at the trials.
    """
    peaks = [point.peak_bytes for point in chart.points]
    if chart.leaves_ceiling_out:
        return Scale(0.0, 1.15 * max(peaks) / unit)
    high = max(chart.cap_bytes, *peaks, 0) / unit
    return (
        Scale(min(peaks) / unit / 1.4, 1.3 * high, is_log=True) if chart.is_far_below_ceiling else Scale(0, 1.06 * high)
    )


def _joins(arm: int, placed: Sequence[tuple[SpeedPoint, float, float]]) -> list[tuple[int, float, float, float, float]]:
    """Return line segments through the points of an arm, by ascending batch."""
    own = sorted((p.candidate.per_device_train_batch_size, x, y) for p, x, y in placed if p.arm == arm)
    return [(arm, x1, y1, x2, y2) for (_, x1, y1), (_, x2, y2) in itertools.pairwise(own)]


@dataclass(frozen=True)
class IntervalRow:
    """A value with its interval, in the unit of the chart."""

    label: str
    value: str
    """The value in words."""
    told: str
    at: float
    low: float
    high: float
    series: int
    """Number of its colour and shape."""
    kind: str = ""
    """Another CSS class: ``best`` is bold."""


def draw_step_chart(chart: StepChart, rows: Sequence[StepRow]) -> Markup:
    """Draw a row for each candidate with its mean step time and the interval of its next run."""
    low, high = min(row.interval[0] for row in rows), max(row.interval[1] for row in rows)
    name, seconds = ("s", 1.0) if low >= 1 else ("ms", 1e-3) if high >= 1e-3 else ("µs", 1e-6)
    intervals = [
        IntervalRow(
            row.candidate.describe() + (f" ({row.mark})" if row.mark else ""),
            f"{format_rate(row.seconds / seconds)} {name}{format_next_run(row.speed.relative_half_width)}",
            row.told,
            row.seconds / seconds,
            row.interval[0] / seconds,
            row.interval[1] / seconds,
            row.arm,
            row.mark or "",
        )
        for row in rows
    ]
    what = "time a sample" if chart.per_sample else "time of an optimizer step"
    return draw_intervals(f"{what} ({name})", intervals)


def draw_intervals(axis: str, rows: Sequence[IntervalRow]) -> Markup:
    """Draw a table with a row for each value: label, interval on a common axis, value."""
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    # So that intervals are visible.
    is_log = high > 2 * low
    margin = 1.05 if is_log else 1 + max(0.01, 0.05 * (high - low) / low)
    across = Scale(low / margin, high * margin, is_log)
    placed = [(row, across(row.low), across(row.high), across(row.at)) for row in rows]
    drawn: Markup = drawings().intervals(placed, _ticks(across), _axis_label(across, axis), _ROW_HEIGHT)
    return drawn


@dataclass(frozen=True)
class Part:
    """A part of a stacked bar."""

    name: str
    size: float
    kind: str
    """CSS class of its colour."""
    told: str
    """Its size in words."""


@dataclass(frozen=True)
class BarMark:
    """A line across a stacked bar."""

    name: str
    at: float
    kind: str


def draw_stack(title: str, parts: Sequence[Part], whole: float, marks: Sequence[BarMark], key: str) -> Markup:
    """Draw one stacked bar with a legend. ``whole`` is the value at its right end."""
    begins = itertools.accumulate((part.size for part in parts), initial=0.0)
    placed = [(part, begin / whole, part.size / whole) for part, begin in zip(parts, begins, strict=False)]
    summary = "; ".join([f"{part.name} {part.told}" for part in parts] + [mark.name for mark in marks])
    drawn: Markup = drawings().stack(
        key, title, summary, _BAR_HEIGHT, placed, [(mark, mark.at / whole) for mark in marks]
    )
    return drawn
