"""Write a study as one HTML page with charts that needs no other file and makes no request.

A drawing is as wide as its page: places across it are per cent of its width, so that text has the same size on every
screen. Colours are CSS classes of the page (``s0`` to ``s7``), so that one drawing serves light and dark.
"""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from autotune import __version__
from autotune.core.outcome import merge_kinds
from autotune.core.prediction import MemoryPrediction
from autotune.core.units import (
    GIB,
    MIB,
    format_bytes,
    format_next_run,
    format_rate,
    format_seconds,
    in_one_line,
    plural,
)
from autotune.estimate.step_time import StepTime
from autotune.results.cells import batch_cell, peak_cell, speed_cell, took_cell
from autotune.results.chart_data import SpeedChart, SpeedPoint, speed_chart, step_rows
from autotune.results.export import beside_lines, make_export, render
from autotune.results.report import Report
from autotune.results.study_view import BestView, StudyView
from autotune.results.wording import counted_in, counts_line, rate_unit, searched_lines, times

FOLDER = Path(__file__).with_name("templates")
_FORMATS = (format_bytes, format_rate, format_next_run, format_seconds, plural, times)
_CELLS = (batch_cell, peak_cell, speed_cell, took_cell)
_WORDS = (counted_in, counts_line, rate_unit, searched_lines)


@functools.cache
def environment(*folders: Path) -> jinja2.Environment:
    """Return a Jinja environment for the templates of these folders and of this package, with its filters."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.globals["version"] = __version__
    made.globals["file"] = lambda name: Markup((FOLDER / name).read_text(encoding="utf-8"))
    made.filters.update(
        {function.__name__.removeprefix("format_"): function for function in (*_FORMATS, *_CELLS, *_WORDS)}
    )
    made.filters["quote"] = shlex.quote
    return made


def _shown(value: Any) -> Any:
    """Return a template's value as text, empty for ``None``, with control characters and lone surrogates escaped."""
    if value is None or isinstance(value, Markup):
        return value or ""
    text = str(value)
    return text if text.isprintable() else "\n".join(map(in_one_line, text.split("\n")))


COLORS = 8
# Of each marker the number of its corners, and the angle of the first in full turns. Without corners it is a circle.
_SHAPES = ((0, 0.0), (4, 1 / 8), (3, 0.0), (4, 0.0), (5, 0.0))
_PLOT_HEIGHT = 320.0
_ROW_HEIGHT = 20.0
_BAR_HEIGHT = 44.0
# Most labels of an axis: as many as a phone has room for.
_TICKS_ACROSS = 5
_TICKS_UP = 6


@dataclass(frozen=True)
class Scale:
    """An axis, linear or logarithmic: maps its values from ``low`` to ``high`` to shares of its length."""

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
        """Return round values within the scale to label, about ``most`` of them at most."""
        ticks: list[float] = []
        if self.is_log:
            # Powers of ten, with more and more values between them as long as these are not too many.
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
                candidates = (factor * 10.0**power for power in powers for factor in factors)
                finer = [tick for tick in candidates if self.low <= tick <= self.high]
                if len(finer) > most:
                    break
                ticks = finer
        if len(ticks) > 2:
            return ticks
        # A linear scale, or a logarithmic one of less than about a decade: multiples of a round step.
        least_step = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(least_step))
        # The small terms allow for rounding.
        step = next(f * power for f in (1.0, 2.0, 2.5, 5.0, 10.0) if f * power >= least_step * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def series_class(number: int) -> str:
    """Return the CSS class of colour ``number``; after the last colour they begin again."""
    return f"s{number % COLORS}"


def _corners(number: int, size: float) -> str | None:
    """Return the corners of marker ``number`` as SVG points around the origin; ``None`` for a circle."""
    corners, first_turn = _SHAPES[number % len(_SHAPES)]
    angles = [2 * math.pi * (first_turn + corner / corners) for corner in range(corners)]
    # A polygon of a circle's radius looks smaller than the circle.
    return " ".join(f"{1.25 * size * math.sin(a):.2f},{-1.25 * size * math.cos(a):.2f}" for a in angles) or None


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


@functools.cache
def drawings() -> Any:
    """Return the template ``charts.html``, whose macros draw, as a module."""
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
    """Draw speed against peak memory: trials, the ceiling, ``×`` for out of memory. ``key`` begins ids of elements."""
    height = _PLOT_HEIGHT
    unit, name = (GIB, "GiB") if _memory_scale(chart, 1).high >= 2 * GIB else (MIB, "MiB")
    across = _memory_scale(chart, unit)
    up = Scale(0.0, 1.12 * max((point.samples_per_second for point in chart.points), default=1.0))
    cap, line = across(chart.cap_bytes / unit), across(chart.line_bytes / unit)
    # The winner and the baseline come last, so that no other mark covers them.
    ordered = sorted(chart.points, key=lambda point: point.mark is not None)
    placed = [(p, across(p.peak_bytes / unit), height * (1 - up(p.samples_per_second))) for p in ordered]
    ticks = [(height * (1 - up(tick)), f"{tick:,g}") for tick in (up.ticks(_TICKS_UP) if placed else [])]
    # Candidates that ran out have no speed: their marks are stacked at the ceiling.
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
        [join for arm in range(len(chart.arms)) for join in _lines(arm, placed)],
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


def _lines(arm: int, placed: Sequence[tuple[SpeedPoint, float, float]]) -> list[tuple[int, float, float, float, float]]:
    """Return the segments ``(arm, x1, y1, x2, y2)`` of the line through an arm's points by ascending batch."""
    own = sorted((p.candidate.per_device_train_batch_size, x, y) for p, x, y in placed if p.arm == arm)
    return [(arm, x1, y1, x2, y2) for (_, x1, y1), (_, x2, y2) in itertools.pairwise(own)]


@dataclass(frozen=True)
class IntervalRow:
    """A row of a chart of intervals: a value with its interval, in the unit of the chart."""

    label: str
    value: str
    """The value as text."""
    told: str
    """The row in words, for its tooltip."""
    at: float
    """The value."""
    low: float
    high: float
    series: int
    """Number of its colour and shape."""
    kind: str = ""
    """Another CSS class: ``best`` is bold."""


def draw_intervals(axis: str, rows: Sequence[IntervalRow]) -> Markup:
    """Draw a table with a row for each value: label, interval on a common axis, value."""
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    # The axis begins near the lowest value, not at 0, so that intervals are visible.
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
    """Its size as text, with the unit."""


@dataclass(frozen=True)
class BarMark:
    """A line across a stacked bar at the value ``at``, of the CSS class ``kind``."""

    name: str
    at: float
    kind: str


def draw_stack(title: str, parts: Sequence[Part], whole: float, marks: Sequence[BarMark], key: str) -> Markup:
    """Draw one stacked bar with its marks. ``whole`` is the value at its right end; ``key`` begins ids of elements."""
    begins = itertools.accumulate((part.size for part in parts), initial=0.0)
    placed = [(part, begin / whole, part.size / whole) for part, begin in zip(parts, begins, strict=False)]
    summary = "; ".join([f"{part.name} {part.told}" for part in parts] + [mark.name for mark in marks])
    drawn: Markup = drawings().stack(
        key, title, summary, _BAR_HEIGHT, placed, [(mark, mark.at / whole) for mark in marks]
    )
    return drawn


# Most marks and rows in a chart; the table has all trials.
_MOST_MARKS = 600
_MOST_STEP_ROWS = 24
_MOST_KINDS = 6
"""Kinds of work with a colour of their own."""
_ANATOMY = ("weights", "gradients", "optimizer", "activations", "inputs", "workspaces")

LegendItem = tuple[Markup, str]
"""A small drawing, such as a marker, and what it stands for."""


@dataclass(frozen=True)
class Chart:
    """A chart as a page shows it."""

    drawing: Markup
    legend: tuple[LegendItem, ...] = ()
    left_out: int = 0
    """Number of marks or rows that would be too many to show."""
    rows: tuple[tuple[str, ...], ...] = ()
    """Rows of the table below the drawing: a swatch (a small square in a part's colour), then cells."""
    told: str = ""
    """A sentence below the drawing."""


@dataclass(frozen=True)
class StudyPage:
    """What the template of a study shows; ``None`` leaves a section out."""

    study: StudyView
    speeds: Chart | None
    steps: Chart | None
    memory: Chart | None
    limit: Chart | None
    times: Chart | None

    @property
    def is_running(self) -> bool:
        """Whether there is no result yet."""
        return self.study.report.study.state == "running"


def html_page(report: Report, prediction: MemoryPrediction | None = None, step: StepTime | None = None) -> str:
    """Return a study as an HTML page. ``prediction`` and ``step`` are the winner's; ``None`` omits their sections."""
    shown = study_page(report, prediction, step)
    made = make_export(report) if shown.study.best is not None else None
    export = None if made is None else {"text": render(made, "json").rstrip(), "beside": beside_lines(made)}
    return environment().get_template("report.html").render(shown=shown, export=export)


def study_page(report: Report, prediction: MemoryPrediction | None = None, step: StepTime | None = None) -> StudyPage:
    """Return the template's data for a study, with drawn charts."""
    study = StudyView(report)
    best = study.best
    return StudyPage(
        study,
        speeds=_speeds(report),
        steps=_steps(report),
        memory=_memory(report, best, prediction) if best is not None and prediction is not None else None,
        limit=_limit(best) if best is not None and best.limit_words is not None else None,
        times=_times(best, step) if best is not None and step is not None else None,
    )


def _speeds(report: Report) -> Chart | None:
    """Return the chart of speed against memory; ``None`` without points."""
    everything = speed_chart(report)
    if not everything.points and not everything.over:
        return None
    chart = everything.limited(_MOST_MARKS)
    draw = drawings()
    legend = [(draw.icon(draw.marker(number)), arm.describe()) for number, arm in enumerate(chart.arms)]
    for point in chart.points:
        if point.mark is not None:
            batch = f"{point.candidate.per_device_train_batch_size} × {point.candidate.gradient_accumulation_steps}"
            legend.append((draw.icon(draw.small_ring(point.mark)), f"{point.mark} {batch}"))
    if any(not point.feasible for point in chart.points):
        legend.append((draw.icon(draw.marker(0, filled=False, color=7)), "too little headroom (hollow)"))
    if chart.over:
        legend.append((draw.icon(draw.cross(7)), "out of memory, at the ceiling"))
    left_out = len(everything.points) + len(everything.over) - len(chart.points) - len(chart.over)
    return Chart(draw_speed_chart(chart, "speed"), tuple(legend), left_out)


def _steps(report: Report) -> Chart | None:
    """Return the chart of step times: a row for each candidate with its next run's interval; ``None`` without rows."""
    all_rows = step_rows(report)
    if not all_rows:
        return None
    rows = [row for place, row in enumerate(all_rows) if place < _MOST_STEP_ROWS or row.mark is not None]
    low, high = min(row.interval[0] for row in rows), max(row.interval[1] for row in rows)
    unit, unit_seconds = ("s", 1.0) if low >= 1 else ("ms", 1e-3) if high >= 1e-3 else ("µs", 1e-6)
    intervals = [
        IntervalRow(
            row.candidate.describe() + (f" ({row.mark})" if row.mark else ""),
            f"{format_rate(row.seconds / unit_seconds)} {unit}{format_next_run(row.speed.relative_half_width)}",
            row.told,
            row.seconds / unit_seconds,
            row.interval[0] / unit_seconds,
            row.interval[1] / unit_seconds,
            row.arm,
            row.mark or "",
        )
        for row in rows
    ]
    is_free = report.study.request["effective_batch"] is None
    what = "time a sample" if is_free else "time of an optimizer step"
    return Chart(draw_intervals(f"{what} ({unit})", intervals), left_out=len(all_rows) - len(rows))


def _stack(
    title: str, key: str, parts: Sequence[Part], marks: Sequence[BarMark], more: Sequence[Sequence[str]] = ()
) -> Chart:
    """Return a stacked bar with its table: name, size and share of each part, and then its ``more`` cells, if any."""
    total = sum(part.size for part in parts)
    # A little more than the largest value, so that a mark there is not cut off.
    whole = max([total, *(mark.at for mark in marks)]) * 1.005
    draw, cells = drawings(), more or [()] * len(parts)
    return Chart(
        draw_stack(title, parts, whole, marks, key),
        tuple((draw.icon(draw.rule(mark.kind)), mark.name) for mark in marks),
        rows=tuple(
            (draw.icon(draw.swatch(f"part {part.kind}")), part.name, part.told, f"{part.size / total:.1%}", *added)
            for part, added in zip(parts, cells, strict=True)
        ),
    )


def _memory(report: Report, best: BestView, prediction: MemoryPrediction) -> Chart:
    """Return the chart of the winner's memory at its peak: predicted parts, and marks for measured peak and ceiling."""
    names = [*_ANATOMY, *(name for name in prediction.anatomy if name not in _ANATOMY)]
    parts = [
        Part(name, size, series_class(number), format_bytes(size))
        for number, name in enumerate(names)
        if (size := prediction.anatomy.get(name, 0)) > 0
    ]
    unused = prediction.peak_reserved_bytes - prediction.peak_allocated_bytes
    if unused > 0:
        parts.append(Part("reserved, unused", unused, "spare", format_bytes(unused)))
    cap = report.ceiling.cap_bytes
    marks = [
        BarMark(f"measured peak {format_bytes(best.peak_bytes)}", best.peak_bytes, "mark"),
        BarMark(f"ceiling {format_bytes(cap)}", cap, "ceiling-line"),
    ]
    return _stack("Memory at the peak", "memory", parts, marks)


def _times(best: BestView, step: StepTime) -> Chart:
    """Return the chart of GPU time in a step of the winner: predicted parts, measured total."""
    measured = best.measured
    # Seconds by kind of operation. Kernel names do not tell all kinds apart, so alike ones are merged to compare.
    measured_kinds = merge_kinds(dict(measured.gpu_seconds_by_kind or ()))
    predicted = merge_kinds(step.gpu_seconds_by_kind) if measured_kinds else step.gpu_seconds_by_kind
    kinds = sorted(predicted.items(), key=lambda kind: -kind[1])
    shown = [(name, seconds) for name, seconds in kinds[:_MOST_KINDS] if seconds > 0]
    parts = [
        Part(name.replace("_", " "), seconds, series_class(number), format_seconds(seconds))
        for number, (name, seconds) in enumerate(shown)
    ]
    measured_seconds = [measured_kinds.get(name, 0.0) for name, _ in shown]
    whole = sum(measured_kinds.values())
    rest = sum(seconds for _, seconds in kinds[_MOST_KINDS:])
    if rest > 0:
        parts.append(Part("all other", rest, "spare", format_seconds(rest)))
        measured_seconds.append(whole - sum(measured_seconds))
    busy_share = best.limit.gpu_busy_share
    busy_seconds = None if busy_share is None else busy_share * measured.step_seconds
    marks = [BarMark(f"measured step {format_seconds(measured.step_seconds)}", measured.step_seconds, "ceiling-line")]
    if busy_seconds is not None:
        marks.append(BarMark(f"GPU computes, measured {format_seconds(busy_seconds)}", busy_seconds, "mark"))
    added = [(format_seconds(each), f"{each / whole:.1%}") for each in measured_seconds] if measured_kinds else []
    chart = _stack("The GPU's time in a step", "time", parts, marks, added)
    compared = [("A step", step.seconds, measured.step_seconds), ("the GPU computes", step.gpu_seconds, busy_seconds)]
    told = "; ".join(
        f"{name} {format_seconds(guess)} predicted"
        + (", not measured" if real is None else f", {format_seconds(real)} measured ({guess / real - 1:+.1%})")
        for name, guess, real in compared
    )
    return replace(chart, told=f"{told}.")


def _limit(best: BestView) -> Chart:
    """Return the chart of what limits the winner's step: the shares in which the GPU computes, or waits."""
    limit = best.limit
    # A profiled step waits less than a timed one, so the shares may add up to slightly more than 1.
    shares = [("GPU computes", limit.gpu_busy_share, "s2"), ("waits for the host", limit.host_share, "s1")]
    shares.append(("waits for data", limit.data_share if limit.host_share is not None else None, "s3"))
    parts = [Part(name, share, kind, f"{share:.1%}") for name, share, kind in shares if share]
    whole = max(1.0, sum(part.size for part in parts))
    draw = drawings()
    legend = tuple((draw.icon(draw.swatch(f"part {part.kind}")), f"{part.name}: {part.told}") for part in parts)
    return Chart(draw_stack("Shares of a step", parts, whole, (), "limit"), legend)
