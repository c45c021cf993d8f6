"""Draw the charts of a study: speed against memory, values with intervals, stacked bars.

A drawing is as wide as its page: places across it are per cent of its width, so that text has the same size on every
screen. Colours are CSS classes of the page (``s0`` to ``s7``), so that one drawing serves light and dark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autotune.core.units import GIB, MIB, format_bytes, format_next_run, format_rate
from autotune.results.chart_data import SpeedChart, SpeedPoint, StepChart, StepRow
from autotune.results.html.markup import Child, element

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
        """Return the place of a value, from 0 to 1; values beyond the ends are put at the ends."""
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


def marker(number: int, size: float = 5.0, *, filled: bool = True, told: str | None = None) -> Markup:
    """Draw the mark of an arm at the origin; its shape tells arms apart where colours cannot."""
    title = element("title", told) if told else None
    kind = f"{series_class(number)} {'full' if filled else 'hollow'}"
    corners, first = _SHAPES[number % len(_SHAPES)]
    if not corners:
        return element("circle", title, class_=kind, r=size)
    turns = [2 * math.pi * (first + corner / corners) for corner in range(corners)]
    places = " ".join(f"{1.25 * size * math.sin(turn):.2f},{-1.25 * size * math.cos(turn):.2f}" for turn in turns)
    return element("polygon", title, class_=kind, points=places)


def cross(number: int, told: str | None = None) -> Markup:
    """Draw the mark of a candidate that ran out of memory, at the origin."""
    title = element("title", told) if told else None
    return element("path", title, class_=f"{series_class(number)} cross", d="M-4.5-4.5l9 9m0-9l-9 9")


def ring(mark: str) -> Markup:
    """Draw the ring around the winner, the baseline or the expert's choice, at the origin."""
    return element("circle", class_=f"ring {mark}", r=10)


def swatch(kind: str) -> Markup:
    """Draw a square of a colour, at the origin."""
    return element("rect", class_=kind, x=-6, y=-6, width=12, height=12)


def icon(drawing: Markup) -> Markup:
    """Return a mark as a small drawing of its own, for a legend."""
    return element("svg", drawing, width=16, height=16, viewBox="-8 -8 16 16", aria_hidden="true")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _at(share: float, y: float, *children: Child) -> Markup:
    """Move what is drawn at the origin to a place of a drawing."""
    return element("svg", children, x=_percent(share), y=y)


def _svg(key: str, title: str, told: str, kind: str, height: float, *children: Child) -> Markup:
    """Build a drawing with a title and a description for screen readers."""
    names = f"{key}-t", f"{key}-d"
    described = element("title", title, id=names[0]), element("desc", told, id=names[1])
    return element("svg", described, children, class_=kind, role="img", aria_labelledby=" ".join(names), height=height)


def _text(share: float, y: float, text: str, anchor: str, class_: str) -> Markup:
    return element("text", text, x=_percent(share), y=y, text_anchor=anchor, class_=class_)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=_percent(x1), y1=y1, x2=_percent(x2), y2=y2, class_=class_)


def _axis_across(across: Scale, height: float, label: str) -> Child:
    """Draw the labels of an axis below a drawing, and its grid in it."""
    ticks = [(across(tick), f"{tick:,g}") for tick in across.ticks(_TICKS_ACROSS)]
    log = ", logarithmic" if across.is_log else ""
    return [
        [_line(x, 0, x, height, "grid") for x, _ in ticks],
        [_text(x, height + 18, words, "middle", "tick") for x, words in ticks],
        _line(0, height, 1, height, "axis"),
        _text(
            0.5, height + 40, f"{label.removesuffix(')')}{log}{')' if label.endswith(')') else ''}", "middle", "label"
        ),
    ]


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
    ceiling = [] if chart.leaves_ceiling_out else [
        element("rect", class_="headroom", x=_percent(line), y=0, width=_percent(max(0.0, cap - line)), height=height),
        _line(line, 0, line, height, "feasible-line"),
        _line(cap, 0, cap, height, "ceiling-line"),
    ]  # fmt: skip
    return _svg(
        key,
        "Speed against memory",
        words,
        "plot",
        height,
        _axis_across(across, height, f"peak memory ({name})"),
        [_line(0, y, 1, y, "grid") for y, _ in ticks],
        [_at(0, y + 4, element("text", words, x=-8, text_anchor="end", class_="tick")) for y, words in ticks],
        _at(0, -30, element("text", chart.rate_unit, x=-58, text_anchor="start", class_="label")),
        ceiling,
        _text(1, -10, chart.ceiling_words, "end", "ceiling-text"),
        [_connection(arm, placed) for arm in range(len(chart.arms))],
        [_at(cap, height - 9 - spacing * place, cross(each.arm, each.told)) for place, each in enumerate(over)],
        [
            _at(x, y, marker(p.arm, filled=p.feasible, told=p.told), ring(p.mark) if p.mark is not None else None)
            for p, x, y in placed
        ],
    )


def _memory_scale(chart: SpeedChart, unit: int) -> Scale:
    """Return a linear scale to beyond the ceiling; a logarithmic one where all trials would be at the left edge.

    Where no trial came near the ceiling, the scale ends at the trials.
    """
    peaks = [point.peak_bytes for point in chart.points]
    if chart.leaves_ceiling_out:
        return Scale(0.0, 1.15 * max(peaks) / unit)
    high = max(chart.cap_bytes, *peaks, 0) / unit
    return (
        Scale(min(peaks) / unit / 1.4, 1.3 * high, is_log=True) if chart.is_far_below_ceiling else Scale(0, 1.06 * high)
    )


def _connection(arm: int, placed: Sequence[tuple[SpeedPoint, float, float]]) -> Child:
    """Draw a thin line through the trials of an arm, from the smallest batch to the largest."""
    own = sorted((p.candidate.per_device_train_batch_size, x, y) for p, x, y in placed if p.arm == arm)
    pairs = itertools.pairwise(own)
    return [_line(x1, y1, x2, y2, f"{series_class(arm)} connection") for (_, x1, y1), (_, x2, y2) in pairs]


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
    """Draw a row for each candidate: its mean step time, and the interval of the next run."""
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
    """Draw a table with a row for each value: its label, its interval over one axis, and the value."""
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    # So that intervals are visible.
    is_log = high > 2 * low
    margin = 1.05 if is_log else 1 + max(0.01, 0.05 * (high - low) / low)
    across = Scale(low / margin, high * margin, is_log)
    grid = [across(tick) for tick in across.ticks(_TICKS_ACROSS)]
    lines = [_line(x, -_ROW_HEIGHT, x, 2 * _ROW_HEIGHT, "grid") for x in grid]
    drawn = [
        element(
            "tr",
            element("th", row.label, scope="row"),
            element("td", element("svg", lines, _interval(row, across), height=_ROW_HEIGHT, aria_hidden="true")),
            element("td", row.value, class_="number"),
            class_=f"row {row.kind}".rstrip(),
            title=row.told,
        )
        for row in rows
    ]
    axis_below = element("svg", _axis_across(across, 1.0, axis), height=46, aria_hidden="true")
    foot = element("tr", element("td"), element("td", axis_below), element("td"))
    return element("table", element("tbody", drawn), element("tfoot", foot), class_="intervals")


def _interval(row: IntervalRow, across: Scale) -> Child:
    kind, center, low, high = f"{series_class(row.series)} whisker", _ROW_HEIGHT / 2, across(row.low), across(row.high)
    return [
        _line(low, center, high, center, kind),
        [_line(x, center - 4, x, center + 4, kind) for x in (low, high)],
        _at(across(row.at), center, marker(row.series, 4.0)),
    ]


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
    """Draw one stacked bar; ``whole`` is the value at its right end. A legend has the names of parts and marks."""
    drawn, before = [], 0.0
    for part in parts:
        words = element("title", f"{part.name}: {part.told}")
        place = {"x": _percent(before / whole), "width": _percent(part.size / whole)}
        drawn.append(element("rect", words, class_=f"part {part.kind}", y=6, height=_BAR_HEIGHT - 12, **place))
        before += part.size
    drawn += [
        element("line", element("title", mark.name), class_=mark.kind, y1=0, y2=_BAR_HEIGHT, x1=x, x2=x)
        for mark in marks
        for x in [_percent(mark.at / whole)]
    ]
    summary = "; ".join([f"{part.name} {part.told}" for part in parts] + [mark.name for mark in marks])
    return _svg(key, title, summary, "bar", _BAR_HEIGHT, drawn)
