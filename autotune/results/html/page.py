"""Write a study as one HTML page that needs no other file and makes no request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from autotune.core.kernel_kinds import merge_kinds
from autotune.core.prediction import MemoryPrediction
from autotune.core.units import format_bytes, format_seconds
from autotune.estimate.step_time import StepTime
from autotune.results.chart_data import speed_chart, step_chart
from autotune.results.export import beside_lines, make_export, render
from autotune.results.html.charts import (
    BarMark,
    Part,
    draw_speed_chart,
    draw_stack,
    draw_step_chart,
    drawings,
    series_class,
)
from autotune.results.html.markup import environment
from autotune.results.report import Report
from autotune.results.study_view import BestView, StudyView

# Most marks and rows in a chart; the table has all trials.
_MOST_MARKS = 600
_MOST_STEP_ROWS = 24
_MOST_KINDS = 6
"""Kinds of work with a colour of their own."""
_ANATOMY = ("weights", "gradients", "optimizer", "activations", "inputs", "workspaces")

LegendItem = tuple[Markup, str]
"""A small drawing and its words."""


@dataclass(frozen=True)
class Chart:
    """A chart as a page shows it."""

    drawing: Markup
    legend: tuple[LegendItem, ...] = ()
    left_out: int = 0
    """How many marks or rows it leaves out."""
    rows: tuple[tuple[str, ...], ...] = ()
    """Of the table below it: a swatch, and cells."""
    told: str = ""


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
        return self.study.record.state == "running"


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
    """Return the chart of step times; ``None`` without rows."""
    chart = step_chart(report)
    if not chart.rows:
        return None
    shown = list(chart.rows[:_MOST_STEP_ROWS])
    shown += [row for row in chart.rows[_MOST_STEP_ROWS:] if row.mark is not None]
    return Chart(draw_step_chart(chart, shown), left_out=len(chart.rows) - len(shown))


def _stack(
    title: str, key: str, parts: Sequence[Part], marks: Sequence[BarMark], more: Iterable[Sequence[str]] = ()
) -> Chart:
    """Return a stacked bar with its table: name, size, share and ``more`` cells of each part."""
    total = sum(part.size for part in parts)
    whole = max([total, *(mark.at for mark in marks)]) * 1.005
    draw, cells = drawings(), list(more) or [()] * len(parts)
    return Chart(
        draw_stack(title, parts, whole, marks, key),
        tuple((draw.icon(draw.rule(mark.kind)), mark.name) for mark in marks),
        rows=tuple(
            (draw.icon(draw.swatch(f"part {part.kind}")), part.name, part.told, f"{part.size / total:.1%}", *added)
            for part, added in zip(parts, cells, strict=True)
        ),
    )


def _memory(report: Report, best: BestView, prediction: MemoryPrediction) -> Chart:
    """Return the chart of predicted memory at the peak."""
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
    told_apart = dict(measured.gpu_seconds_by_kind or ())
    predicted = merge_kinds(step.gpu_seconds_by_kind) if told_apart else step.gpu_seconds_by_kind
    kinds = sorted(predicted.items(), key=lambda kind: -kind[1])
    parts = [
        Part(name.replace("_", " "), seconds, series_class(number), format_seconds(seconds))
        for number, (name, seconds) in enumerate(kinds[:_MOST_KINDS])
        if seconds > 0
    ]
    seen = {kind.replace("_", " "): seconds for kind, seconds in merge_kinds(told_apart).items()}
    rest = sum(seconds for _, seconds in kinds[_MOST_KINDS:])
    if rest > 0:
        others = sum(seen.values()) - sum(seen.get(part.name, 0.0) for part in parts)
        parts.append(Part("all other", rest, "spare", format_seconds(rest)))
        seen = seen and {**seen, "all other": others}
    busy = best.limit.gpu_busy_share
    computes = None if busy is None else busy * measured.step_seconds
    marks = [BarMark(f"measured step {format_seconds(measured.step_seconds)}", measured.step_seconds, "ceiling-line")]
    if computes is not None:
        marks.append(BarMark(f"GPU computes, measured {format_seconds(computes)}", computes, "mark"))
    whole = sum(told_apart.values())
    measured_seconds = [seen.get(part.name, 0.0) for part in parts] if seen else []
    chart = _stack(
        "The GPU's time in a step",
        "time",
        parts,
        marks,
        [(format_seconds(each), f"{each / whole:.1%}") for each in measured_seconds],
    )
    compared = [("A step", step.seconds, measured.step_seconds), ("the GPU computes", step.gpu_seconds, computes)]
    told = "; ".join(
        f"{name} {format_seconds(guess)} predicted"
        + (", not measured" if real is None else f", {format_seconds(real)} measured ({guess / real - 1:+.1%})")
        for name, guess, real in compared
    )
    return replace(chart, told=f"{told}.")


def _limit(best: BestView) -> Chart:
    """Return the chart of what limits the winner's step."""
    limit = best.limit
    # A profiled step waits less than a timed one, so the shares may add up to slightly more than 1.
    shares = [("GPU computes", limit.gpu_busy_share, "s2"), ("waits for the host", limit.host_share, "s1")]
    shares.append(("waits for data", limit.data_share if limit.host_share is not None else None, "s3"))
    parts = [Part(name, share, kind, f"{share:.1%}") for name, share, kind in shares if share]
    whole = max(1.0, sum(part.size for part in parts))
    draw = drawings()
    legend = tuple((draw.icon(draw.swatch(f"part {part.kind}")), f"{part.name}: {part.told}") for part in parts)
    return Chart(draw_stack("Shares of a step", parts, whole, (), "limit"), legend)
