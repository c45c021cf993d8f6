"""Draw the charts of a study as SVG: speed against memory, step times with intervals, stacked bars.

Colours are CSS classes of the page (``s0`` to ``s7`` for arms), so that one drawing serves light and dark. Each chart
is drawn for a given width in pixels, since text in a drawing that is scaled down to a phone would be too small to read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autotune.core.units import GIB, MIB, format_bytes, format_next_run, format_rate
from autotune.results.chart_data import OverPoint, SpeedChart, SpeedPoint, StepChart, StepRow
from autotune.results.html.axes import Box, Scale, place_label, shortened, text_width
from autotune.results.html.markup import Child, element

COLORS = 8
_SHAPES = ("circle", "square", "triangle", "diamond", "pentagon")
# Distance of a chart's content from its left and right edges in pixels, so that half a tick label has room.
_EDGE = 14.0
_NARROW = 520.0


def series_class(arm: int) -> str:
    """Return the CSS class of an arm's colour."""
    return f"s{arm % COLORS}"


def marker(arm: int, x: float, y: float, size: float = 5.0, *, filled: bool = True, told: str | None = None) -> Markup:
    """Draw the mark of an arm; its shape tells arms apart where colours cannot."""
    title = element("title", told) if told else None
    kind = f"{series_class(arm)} {'full' if filled else 'hollow'}"
    shape = _SHAPES[arm % len(_SHAPES)]
    if shape == "circle":
        return element("circle", title, class_=kind, cx=x, cy=y, r=size)
    if shape == "square":
        side = size * 1.8
        return element("rect", title, class_=kind, x=x - side / 2, y=y - side / 2, width=side, height=side)
    sides = {"triangle": 3, "diamond": 4, "pentagon": 5}[shape]
    corners = (2 * math.pi * corner / sides for corner in range(sides))
    radius = size * 1.25
    places = " ".join(f"{x + radius * math.sin(turn):.2f},{y - radius * math.cos(turn):.2f}" for turn in corners)
    return element("polygon", title, class_=kind, points=places)


def cross(arm: int, x: float, y: float, size: float = 4.5, told: str | None = None) -> Markup:
    """Draw the mark of a candidate that ran out of memory."""
    path = (
        f"M{x - size:.2f} {y - size:.2f}l{2 * size:.2f} {2 * size:.2f}m0 {-2 * size:.2f}l{-2 * size:.2f} {2 * size:.2f}"
    )
    return element("path", element("title", told) if told else None, class_=f"{series_class(arm)} cross", d=path)


def _svg(key: str, title: str, told: str, width: float, height: float, *children: Child) -> Markup:
    """Build a drawing with a title and a description for screen readers."""
    names = f"{key}-t", f"{key}-d"
    return element(
        "svg",
        element("title", title, id=names[0]),
        element("desc", told, id=names[1]),
        children,
        role="img",
        aria_labelledby=" ".join(names),
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
    )


def _text(x: float, y: float, text: str, anchor: str = "start", class_: str | None = None) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor, class_=class_)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def draw_speed_chart(chart: SpeedChart, key: str, width: float) -> Markup:
    """Draw speed against peak memory: a mark for each trial, the ceiling, ``×`` for out of memory."""
    height = 340.0 if width < _NARROW else 420.0
    area = Box(62.0, 46.0, width - 20.0, height - 48.0)
    across = _memory_scale(chart, area)
    fastest = max((point.samples_per_second for point in chart.points), default=1.0)
    up = Scale(0.0, fastest * 1.12, area.bottom, area.top)
    # The winner and the baseline come last, so that no other mark covers them.
    ordered = sorted(chart.points, key=lambda point: point.mark is not None)
    placed = [(point, across(point.peak_bytes), up(point.samples_per_second)) for point in ordered]
    crosses = _stack(chart.over, across(chart.cap_bytes), area)
    title = "Speed against memory"
    words = (
        f"{len(chart.points)} completed trials by peak memory and {chart.rate_unit}; ceiling "
        f"{format_bytes(chart.cap_bytes)}; {len(chart.over)} candidates ran out of memory. The table of trials has "
        "all values."
    )
    return _svg(
        key,
        title,
        words,
        width,
        height,
        _memory_axis(across, area),
        _speed_axis(up, area, chart.rate_unit, has_values=bool(chart.points)),
        _ceiling(chart, across, area),
        [_connection(arm, placed) for arm in range(len(chart.arms))],
        [cross(over.arm, x, y, told=over.told) for over, x, y in crosses],
        [marker(point.arm, x, y, filled=point.feasible, told=point.told) for point, x, y in placed],
        _point_labels(placed, crosses, across(chart.line_bytes), across(chart.cap_bytes), area),
    )


def _memory_scale(chart: SpeedChart, area: Box) -> Scale:
    """Return a linear scale to beyond the ceiling; a logarithmic one where all trials would be at the left edge.

    Where no trial came near the ceiling, the scale ends at the trials.
    """
    if chart.leaves_ceiling_out:
        return Scale(0.0, max(point.peak_bytes for point in chart.points) * 1.15, area.left, area.right)
    high = max([chart.cap_bytes, *(point.peak_bytes for point in chart.points)])
    if chart.is_far_below_ceiling:
        low = min(point.peak_bytes for point in chart.points)
        return Scale(low / 1.4, high * 1.3, area.left, area.right, is_log=True)
    return Scale(0.0, high * 1.06, area.left, area.right)


def _memory_axis(across: Scale, area: Box) -> Child:
    unit, name = (GIB, "GiB") if across.high >= 2 * GIB else (MIB, "MiB")
    in_unit = Scale(across.low / unit, across.high / unit, across.start, across.end, across.is_log)
    ticks = in_unit.ticks(int((area.right - area.left) / 60))
    log = ", logarithmic" if across.is_log else ""
    return [
        [_line(in_unit(tick), area.top, in_unit(tick), area.bottom, "grid") for tick in ticks],
        [_text(in_unit(tick), area.bottom + 18, f"{tick:,g}", "middle", "tick") for tick in ticks],
        _line(area.left, area.bottom, area.right, area.bottom, "axis"),
        _text((area.left + area.right) / 2, area.bottom + 40, f"peak memory ({name}{log})", "middle", "label"),
    ]


def _speed_axis(up: Scale, area: Box, unit: str, *, has_values: bool) -> Child:
    ticks = up.ticks(6) if has_values else []
    return [
        [_line(area.left, up(tick), area.right, up(tick), "grid") for tick in ticks],
        [_text(area.left - 8, up(tick) + 4, f"{tick:,g}", "end", "tick") for tick in ticks],
        _text(4, 16, unit, "start", "label"),
    ]


def _ceiling(chart: SpeedChart, across: Scale, area: Box) -> Child:
    """Draw the cap, the line, and the headroom between them."""
    cap, line = across(chart.cap_bytes), across(chart.line_bytes)
    words = f"ceiling {format_bytes(chart.cap_bytes)}, {format_bytes(chart.line_bytes)} with headroom"
    if chart.leaves_ceiling_out:
        words = f"ceiling {format_bytes(chart.cap_bytes)}, far to the right"
        return _text(area.right, area.top - 10, words, "end", "ceiling-text")
    return [
        element(
            "rect", class_="headroom", x=line, y=area.top, width=max(0.0, cap - line), height=area.bottom - area.top
        ),
        _line(line, area.top, line, area.bottom, "feasible-line"),
        _line(cap, area.top, cap, area.bottom, "ceiling-line"),
        _text(min(cap, area.right), area.top - 10, words, "end", "ceiling-text"),
    ]


def _stack(over: Sequence[OverPoint], x: float, area: Box) -> list[tuple[OverPoint, float, float]]:
    """Place candidates that ran out of memory at the ceiling, stacked from the bottom, since they have no speed."""
    ordered = sorted(over, key=lambda each: (each.candidate.per_device_train_batch_size, each.arm))
    spacing = min(14.0, (area.bottom - area.top - 20) / max(1, len(ordered)))
    return [(each, x, area.bottom - 9 - spacing * place) for place, each in enumerate(ordered)]


Placed = tuple[SpeedPoint, float, float]


def _connection(arm: int, placed: Iterable[Placed]) -> Markup | None:
    """Draw a thin line through the trials of an arm, from the smallest batch to the largest."""
    own = sorted(
        ((point.candidate.per_device_train_batch_size, x, y) for point, x, y in placed if point.arm == arm),
        key=lambda each: each[0],
    )
    places = " ".join(f"{x:.2f},{y:.2f}" for _, x, y in own)
    return element("polyline", class_=f"{series_class(arm)} connection", points=places) if len(own) > 1 else None


def _point_labels(
    placed: Sequence[Placed], crosses: Sequence[tuple[OverPoint, float, float]], line: float, cap: float, area: Box
) -> Child:
    """Ring and label the winner and the baseline, where few marks are covered."""
    marks = [Box(x - 7, y - 7, x + 7, y + 7) for _, x, y in (*placed, *crosses)]
    marks += [Box(x - 11, y - 11, x + 11, y + 11) for point, x, y in placed if point.mark is not None]
    if line < cap:
        marks.append(Box(line - 2, area.top, cap + 2, area.bottom))
    labels: list[Box] = []
    parts: list[Child] = []
    for point, x, y in sorted(placed, key=lambda each: each[0].mark == "baseline"):
        if point.mark is None:
            continue
        batch = f"{point.candidate.per_device_train_batch_size} × {point.candidate.gradient_accumulation_steps}"
        words = f"{point.mark} {batch}"
        box = place_label(words, x, y, area, labels, marks)
        labels.append(box)
        parts += [
            element("circle", class_=f"ring {point.mark}", cx=x, cy=y, r=10),
            _text((box.left + box.right) / 2, box.bottom - 3, words, "middle", f"point-label {point.mark}"),
        ]
    return parts


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


def draw_step_chart(chart: StepChart, rows: Sequence[StepRow], key: str, width: float) -> Markup:
    """Draw a row for each candidate: its mean step time, and the interval of the next run."""
    low, high = min(row.low_seconds for row in rows), max(row.high_seconds for row in rows)
    name, seconds = ("s", 1.0) if low >= 1 else ("ms", 1e-3) if high >= 1e-3 else ("µs", 1e-6)
    intervals = [
        IntervalRow(
            row.candidate.describe() + (f" ({row.mark})" if row.mark else ""),
            f"{format_rate(row.seconds / seconds)} {name}{format_next_run(row.relative_half_width)}",
            row.told,
            row.seconds / seconds,
            row.low_seconds / seconds,
            row.high_seconds / seconds,
            row.arm,
            row.mark or "",
        )
        for row in rows
    ]
    what = "time a sample" if chart.per_sample else "time of an optimizer step"
    return draw_intervals("Step times", f"{what} ({name})", intervals, key, width)


def draw_intervals(title: str, axis: str, rows: Sequence[IntervalRow], key: str, width: float) -> Markup:
    """Draw a row for each value: its label, the value and its interval, over one axis."""
    narrow = width < _NARROW
    longest = max(text_width(row.label) for row in rows)
    label_width = 0.0 if narrow else min(max(longest + _EDGE + 16, 236.0), 360.0)
    value_width, row_height, top = (0.0, 44.0, 8.0) if narrow else (128.0, 28.0, 8.0)
    area = Box(label_width + _EDGE, top, width - value_width - _EDGE, top + row_height * len(rows))
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    # So that intervals are visible.
    is_log = high > 2 * low
    margin = 1.05 if is_log else 1 + max(0.01, 0.05 * (high - low) / low)
    across = Scale(low / margin, high * margin, area.left, area.right, is_log)
    summary = f"{axis}, {len(rows)} rows. First: {rows[0].told}. Last: {rows[-1].told}."
    ticks = across.ticks(int((area.right - area.left) / 56))
    return _svg(
        key,
        title,
        summary,
        width,
        area.bottom + 46,
        [_line(across(tick), area.top, across(tick), area.bottom, "grid") for tick in ticks],
        [_text(across(tick), area.bottom + 18, f"{tick:,g}", "middle", "tick") for tick in ticks],
        _line(area.left, area.bottom, area.right, area.bottom, "axis"),
        _text(
            (area.left + area.right) / 2,
            area.bottom + 40,
            f"{axis.removesuffix(')')}, logarithmic{')' if axis.endswith(')') else ''}" if across.is_log else axis,
            "middle",
            "label",
        ),
        [_interval(row, across, area, area.top + row_height * place, narrow=narrow) for place, row in enumerate(rows)],
    )


def _interval(row: IntervalRow, across: Scale, area: Box, top: float, *, narrow: bool) -> Child:
    center = top + (31 if narrow else 14)
    base = top + 16 if narrow else center + 4
    room = (area.right - text_width(row.value) - 10 if narrow else area.left - 12) - 2
    low, high = across(row.low), across(row.high)
    return element(
        "g",
        element("title", row.told),
        _text(2, base, shortened(row.label, room), "start", "row-label"),
        _line(low, center, high, center, f"{series_class(row.series)} whisker"),
        [_line(x, center - 4, x, center + 4, f"{series_class(row.series)} whisker") for x in (low, high)],
        marker(row.series, across(row.at), center, 4.0),
        _text(area.right + (_EDGE if narrow else 132 + _EDGE - 6), base, row.value, "end", "row-value"),
        class_=f"row {row.kind}".rstrip(),
    )


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


def draw_stack(
    title: str, parts: Sequence[Part], whole: float, marks: Sequence[BarMark], key: str, width: float
) -> Markup:
    """Draw one stacked bar; ``whole`` is the value at its right end. Names are written where they fit."""
    top = 8.0
    bottom = top + 44
    across = Scale(0.0, whole, 1.0, width - 1.0)
    # Names are written left of marks in the right half, and right of the others. Each has its own row, in such an order
    # that no mark's line crosses another's name.
    right = sorted((mark for mark in marks if across(mark.at) > width / 2), key=lambda mark: mark.at)
    left = sorted((mark for mark in marks if mark not in right), key=lambda mark: -mark.at)
    rows = list(enumerate([*left, *right]))
    drawn: list[Child] = []
    before = 0.0
    for part in parts:
        start, end = across(before), across(before + part.size)
        before += part.size
        fits = text_width(part.name) + 8 < end - start
        drawn.append(
            element(
                "g",
                element("title", f"{part.name}: {part.told}"),
                element("rect", class_=f"part {part.kind}", x=start, y=top, width=end - start, height=bottom - top),
                _text((start + end) / 2, (top + bottom) / 2 + 4, part.name, "middle", "in-bar") if fits else None,
            )
        )
    for row, mark in rows:
        x, base = across(mark.at), bottom + 18 + 16 * row
        anchor = "end" if x > width / 2 else "start"
        drawn += [
            _line(x, top - 6, x, base - 11, mark.kind),
            _text(x + (-4 if anchor == "end" else 4), base, mark.name, anchor, "tick"),
        ]
    summary = "; ".join([f"{part.name} {part.told}" for part in parts] + [mark.name for mark in marks])
    return _svg(key, title, summary, width, bottom + 10 + 16 * len(rows), drawn)
