"""Write a study as one HTML page that needs no other file and makes no request."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from autotune import __version__
from autotune.core.candidate import Document
from autotune.core.kernel_kinds import merge_kinds
from autotune.core.outcome import Measurement
from autotune.core.prediction import MemoryPrediction
from autotune.core.units import format_bytes, format_rate, format_seconds, plural
from autotune.estimate.bottleneck import describe_limit, what_limits
from autotune.estimate.step_time import StepTime
from autotune.results.cells import batch_cell, peak_cell, speed_cell, took_cell
from autotune.results.chart_data import SpeedChart, speed_chart, step_chart
from autotune.results.expert import expert_of
from autotune.results.export import beside_lines, make_export, render
from autotune.results.html.markup import Child, Markup, element, joined
from autotune.results.html.style import SCRIPT, STYLE
from autotune.results.html.svg_charts import (
    BarMark,
    Part,
    cross,
    draw_speed_chart,
    draw_stack,
    draw_step_chart,
    marker,
    series_class,
)
from autotune.results.json_document import report_document
from autotune.results.report import Report, measurement
from autotune.results.study_view import study_view
from autotune.results.wording import counts_line, describe_data, detail_lines, times, verdict
from autotune.store.records import TrialRecord

# Widths in pixels of the page's column and of a phone; the style sheet shows one of the two drawings.
_WIDTHS = (("wide", 920.0), ("narrow", 358.0))
# Most marks and rows in a chart; the table has all trials.
_MOST_MARKS = 600
_MOST_STEP_ROWS = 24
_MOST_ARM_NAMES = 3
_MOST_KINDS = 6
"""Kinds of work with a colour of their own."""
_ANATOMY = ("weights", "gradients", "optimizer", "activations", "inputs", "workspaces")


def html_page(report: Report, prediction: MemoryPrediction | None = None, step: StepTime | None = None) -> str:
    """Return the page. ``prediction`` and ``step`` are those of the winner; ``None`` leaves their section out."""
    document = report_document(study_view(report))
    title = f"{report.study.name}: autotune report"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        ),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    body = element(
        "body",
        _header(report),
        element(
            "main",
            _result_sections(report, document, prediction, step),
            _export_section(report),
            _trials_section(report),
        ),
        element("footer", element("p", f"Written by autotune {__version__}.", class_="soft")),
        element("script", Markup(SCRIPT)) if report.best is not None else None,
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def report_sections(report: Report, log_link: Callable[[TrialRecord], Child] | None = None) -> list[Child]:
    """Return what the page shows of a study, for a page that has its own frame and its own way to export.

    ``log_link`` makes what leads to a trial's log.
    """
    facts = element("details", element("summary", "What was searched, on what"), _header_lines(report))
    document = report_document(study_view(report))
    if report.study.state == "running":
        # They are about a result.
        document = {**document, "notes": []}
    found = [*_result_sections(report, document), _trials_section(report, log_link), facts]
    return [section for section in found if section is not None]


def _result_sections(
    report: Report, document: Document, prediction: MemoryPrediction | None = None, step: StepTime | None = None
) -> list[Child]:
    return [
        _answer(report, document),
        _speed_section(report),
        _step_section(report),
        _anatomy_section(report, prediction),
        _limit_section(report),
        _time_section(report, step),
        _left_out_section(document),
        _notes_section(document),
    ]


def _section(title: str, *children: Child) -> Markup:
    return element("section", element("h2", title), children)


def _header(report: Report) -> Markup:
    return element("header", element("h1", report.study.name), _header_lines(report))


def _header_lines(report: Report) -> Markup:
    workload, environment, request = report.workload, report.environment, report.study.request
    packages = environment["packages"]
    task = "" if workload["task"] == "own" else f"{workload['task']}, "
    batch = f"effective batch {request['effective_batch']}" if request["effective_batch"] else "any batch"
    driver = environment.get("driver")
    lines = [
        f"{workload['model']}, {task}{workload['dtype']} weights",
        f"{describe_data(workload)}; {batch}",
        f"{environment['device_name']}, torch {packages['torch']}, transformers {packages['transformers']}"
        + (f", driver {driver}" if driver else ""),
        f"{report.study.started_at:%Y-%m-%d %H:%M} UTC; {counts_line(report)}",
    ]
    return element("p", [[line, element("br")] for line in lines], class_="soft")


def _answer(report: Report, document: Document) -> Markup:
    """Show the best configuration, and the speed of its next run."""
    best, measured = report.best, report.pooled(report.best)
    is_running = report.study.state == "running"
    heading = element("h2", "Best so far" if is_running else "Best configuration")
    if best is None or measured is None:
        return element(
            "section",
            heading,
            element("p", "none yet" if is_running else "none: no trial is feasible", class_="setting"),
            element("p", f"{counts_line(report)}. The table below says what became of each trial.", class_="soft"),
            class_="answer",
        )
    world_size = report.study.request["world_size"]
    setting = (
        f"per-device batch {best.candidate.per_device_train_batch_size} × accumulation "
        f"{best.candidate.gradient_accumulation_steps}"
        + (f" × {world_size} devices" if world_size > 1 else "")
        + f", {best.candidate.arm.describe()}"
    )
    figures = [
        _speed_figure(document),
        _step_figure(report, best, measured),
        _speedup_figure(report),
        _expert_figure(report),
    ]
    figures.append(_memory_figure(report, measured, best))
    details = detail_lines(report, best, measured)
    return element(
        "section",
        heading,
        element("p", setting, class_="setting"),
        element("dl", figures, class_="figures"),
        element("ul", [element("li", line) for line in details], class_="details soft") if details else None,
        class_="answer",
    )


def _figure(name: str, value: str, *more: str) -> Markup:
    told = joined(element("div", line, class_="soft") for line in more)
    return element("div", element("dt", name), element("dd", element("strong", value), told))


def _speed_figure(document: Document) -> Markup | None:
    promised = document["next_run"]
    if promised is None:
        return None
    low, high = promised["samples_per_second_low"], promised["samples_per_second_high"]
    processes = promised["processes_measured"]
    return _figure(
        "Speed",
        f"{format_rate(promised['samples_per_second'])} samples/s",
        f"next run: {format_rate(low)} to {format_rate(high)}",
        f"95 % interval, {processes} process{'' if processes == 1 else 'es'} measured",
    )


def _step_figure(report: Report, best: TrialRecord, measured: Measurement) -> Markup:
    tokens = report.tokens_per_second(measured)
    samples = best.candidate.samples_per_step
    return _figure(
        "Optimizer step",
        format_seconds(measured.step_seconds),
        f"{plural(samples, 'sample')} on {'a device' if best.candidate.arm.ranks == 1 else 'all devices'}",
        *([f"{format_rate(tokens)} tokens/s"] if tokens else []),
    )


def _speedup_figure(report: Report) -> Markup | None:
    speedup, baseline, speed = report.speedup(), report.baseline, report.speed(report.baseline)
    if speedup is None or baseline is None or speed is None:
        return None
    return _figure(
        "Against the baseline",
        times(speedup),
        f"{report.baseline_name}: {baseline.candidate.describe()}, {format_rate(speed.samples_per_second)} samples/s",
    )


def _expert_figure(report: Report) -> Markup | None:
    expert = expert_of(report)
    if expert is None or expert.speedup is None:
        return None
    return _figure(
        "Against the expert",
        times(expert.speedup),
        f"{expert.candidate.arm.precision} at the largest batch that fits: {expert.candidate.describe()}, "
        f"{format_rate(expert.samples_per_second)} samples/s, {'measured' if expert.is_measured else 'predicted'}",
    )


def _memory_figure(report: Report, measured: Measurement, best: TrialRecord) -> Markup:
    cap, peak = report.ceiling.cap_bytes, measured.judged_bytes(best.candidate.arm)
    expands = best.candidate.arm.expandable_segments
    # Such a trial could reserve no more than the line, so at least the headroom was left.
    spare = report.ceiling.headroom_bytes if expands else cap - peak
    return _figure(
        "Peak memory",
        format_bytes(peak),
        f"{'allocated' if expands else 'reserved'}, of {format_bytes(cap)}",
        f"headroom {format_bytes(spare)} ({spare / cap:.0%})",
    )


def _both_widths(draw: Callable[[str, float], Markup]) -> Markup:
    """Draw a chart for a wide page and for a phone; the style sheet shows one of them."""
    return joined(element("div", draw(name, width), class_=f"chart-{name}") for name, width in _WIDTHS)


def _speed_section(report: Report) -> Markup | None:
    everything = speed_chart(report)
    if not everything.points and not everything.over:
        return None
    chart = everything.limited(_MOST_MARKS)
    caption = (
        "Each mark is a trial; a line joins the trials of one configuration from the smallest batch to the largest. "
        "Higher is faster, further left needs less memory."
    )
    left_out = len(everything.points) + len(everything.over) - len(chart.points) - len(chart.over)
    if left_out:
        caption += f" {plural(left_out, 'slower or larger trial')} left out here; the table has all."
    return _section(
        "Speed against memory",
        element(
            "figure",
            _both_widths(lambda name, width: draw_speed_chart(chart, f"speed-{name}", width)),
            _speed_legend(chart),
            element("figcaption", caption),
        ),
    )


def _icon(drawn: Markup) -> Markup:
    return element("svg", drawn, width=16, height=16, viewBox="0 0 16 16", aria_hidden="true")


def _legend_item(drawn: Markup, words: str) -> Markup:
    return element("li", _icon(drawn), words)


def _speed_legend(chart: SpeedChart) -> Markup:
    items = [_legend_item(marker(number, 8, 8), arm.describe()) for number, arm in enumerate(chart.arms)]
    if any(not point.feasible for point in chart.points):
        items.append(_legend_item(_gray(marker(0, 8, 8, filled=False)), "too little headroom (hollow)"))
    if chart.over:
        items.append(_legend_item(_gray(cross(0, 8, 8)), "out of memory, at the ceiling"))
    return element("ul", items, class_="legend")


def _gray(drawn: Markup) -> Markup:
    return Markup(drawn.replace(series_class(0), "s7", 1))


def _step_section(report: Report) -> Markup | None:
    chart = step_chart(report)
    if not chart.rows:
        return None
    shown = list(chart.rows[:_MOST_STEP_ROWS])
    shown += [row for row in chart.rows[_MOST_STEP_ROWS:] if row.mark is not None]
    caption = (
        "Mean over all processes that measured a candidate. The bar is the interval that the next run lies in, in "
        "95 of 100 cases; it contains what differs between processes."
    )
    if len(shown) < len(chart.rows):
        caption += (
            f" {plural(len(chart.rows) - len(shown), 'slower candidate')} left out here; the table has all trials."
        )
    return _section(
        "Step times",
        element(
            "figure",
            _both_widths(lambda name, width: draw_step_chart(chart, shown, f"steps-{name}", width)),
            element("figcaption", caption),
        ),
    )


def _anatomy_section(report: Report, prediction: MemoryPrediction | None) -> Markup | None:
    best, measured = report.best, report.pooled(report.best)
    if prediction is None or best is None or measured is None:
        return None
    names = [*_ANATOMY, *(name for name in prediction.anatomy if name not in _ANATOMY)]
    parts = [
        Part(name, size, series_class(number), format_bytes(size))
        for number, name in enumerate(names)
        if (size := prediction.anatomy.get(name, 0)) > 0
    ]
    unused = prediction.peak_reserved_bytes - prediction.peak_allocated_bytes
    if unused > 0:
        parts.append(Part("reserved, unused", unused, "spare", format_bytes(unused)))
    cap, peak = report.ceiling.cap_bytes, measured.judged_bytes(best.candidate.arm)
    marks = [
        BarMark(f"measured peak {format_bytes(peak)}", peak, "mark"),
        BarMark(f"ceiling {format_bytes(cap)}", cap, "ceiling-line"),
    ]
    whole = max(cap, peak, prediction.peak_reserved_bytes) * 1.005
    total = sum(part.size for part in parts)
    rows = [element("tr", _cells(part, total)) for part in parts]
    return _section(
        "Memory of the best configuration",
        element(
            "figure",
            _both_widths(
                lambda name, width: draw_stack("Memory at the peak", parts, whole, marks, f"memory-{name}", width)
            ),
            element("table", element("tbody", rows), class_="parts"),
            element(
                "figcaption",
                "Predicted, at the moment of the peak. Without accumulation that is often before there are gradients. "
                "Logits and loss are among the activations.",
            ),
        ),
    )


def _time_section(report: Report, step: StepTime | None) -> Markup | None:
    """Return what the GPU does in a step of the winner, as predicted, beside what was measured of the whole."""
    measured = report.pooled(report.best)
    if step is None or measured is None or report.best is None:
        return None
    told_apart = dict(measured.gpu_seconds_by_kind or ())
    predicted_kinds = merge_kinds(step.gpu_seconds_by_kind) if told_apart else step.gpu_seconds_by_kind
    kinds = sorted(predicted_kinds.items(), key=lambda kind: -kind[1])
    shown = [(name.replace("_", " "), seconds) for name, seconds in kinds[:_MOST_KINDS] if seconds > 0]
    parts = [
        Part(name, seconds, series_class(number), format_seconds(seconds))
        for number, (name, seconds) in enumerate(shown)
    ]
    rest = sum(seconds for _, seconds in kinds[_MOST_KINDS:])
    if rest > 0:
        parts.append(Part("all other", rest, "spare", format_seconds(rest)))
    busy = measured.gpu_busy_share or report.history.busy_share(report.best.candidate)
    computes = None if busy is None else busy * measured.step_seconds
    marks = [BarMark(f"measured step {format_seconds(measured.step_seconds)}", measured.step_seconds, "ceiling-line")]
    if computes is not None:
        marks.append(BarMark(f"GPU computes, measured {format_seconds(computes)}", computes, "mark"))
    total = sum(part.size for part in parts)
    whole = max(total, measured.step_seconds, computes or 0.0) * 1.005
    seen = {kind.replace("_", " "): seconds for kind, seconds in merge_kinds(told_apart).items()}
    named = sum(seen.get(name, 0.0) for name, _ in shown)
    found_of = {**seen, "all other": sum(seen.values()) - named}
    heads = ["", "", "predicted", "share", *(["measured", "share"] if seen else [])]
    rows = [
        element(
            "tr",
            _cells(part, total),
            [
                element("td", format_seconds(found_of.get(part.name, 0.0)), class_="number"),
                element("td", f"{found_of.get(part.name, 0.0) / sum(seen.values()):.1%}", class_="number"),
            ]
            if seen
            else None,
        )
        for part in parts
    ]
    compared = [("a step", step.seconds, measured.step_seconds), ("the GPU computes", step.gpu_seconds, computes)]
    told = "; ".join(
        f"{name} {format_seconds(predicted)} predicted"
        + (", not measured" if found is None else f", {format_seconds(found)} measured ({predicted / found - 1:+.1%})")
        for name, predicted, found in compared
    )
    return _section(
        "Where the time goes",
        element("p", f"{told[:1].upper()}{told[1:]}."),
        element(
            "figure",
            _both_widths(
                lambda name, width: draw_stack("The GPU's time in a step", parts, whole, marks, f"time-{name}", width)
            ),
            element(
                "table",
                element("thead", element("tr", [element("th", head) for head in heads])),
                element("tbody", rows),
                class_="parts",
            ),
            element(
                "figcaption",
                "Times by kind of work are predicted from the operations of a step, and not corrected by measurements. "
                + ("Measured kinds follow from the names of the kernels." if seen else "Only the total is measured."),
            ),
        ),
    )


def _cells(part: Part, total: float) -> list[Markup]:
    """Return a part's cells in the table below its bar: colour, name, size, share."""
    return [
        element("td", _icon(_swatch(part.kind))),
        element("td", part.name),
        element("td", part.told, class_="number"),
        element("td", f"{part.size / total:.1%}", class_="number"),
    ]


def _limit_section(report: Report) -> Markup | None:
    best, measured = report.best, report.pooled(report.best)
    if best is None or measured is None:
        return None
    limit = what_limits(measured)
    line = describe_limit(best.candidate, measured)
    shares = [("GPU computes", limit.gpu_busy_share, "s2"), ("waits for the host", limit.host_share, "s1")]
    # A profiled step waits less than a timed one, so the shares may add up to slightly more than 1.
    shares.append(("waits for data", limit.data_share if limit.host_share is not None else None, "s3"))
    parts = [Part(name, share, kind, f"{share:.1%}") for name, share, kind in shares if share]
    if line is None:
        told = f"Waiting for data takes {limit.data_share:.1%} of a step; what limits the rest was not measured."
        return _section("What limits a step", element("p", told))
    whole = max(1.0, sum(part.size for part in parts))
    legend = [_legend_item(_swatch(part.kind), f"{part.name}: {part.told}") for part in parts]
    return _section(
        "What limits a step",
        element("p", f"{line[:1].upper()}{line[1:]}."),
        element(
            "figure",
            _both_widths(lambda name, width: draw_stack("Shares of a step", parts, whole, (), f"limit-{name}", width)),
            element("ul", legend, class_="legend"),
        ),
    )


def _swatch(kind: str) -> Markup:
    return element("rect", class_=f"part {kind}", x=2, y=2, width=12, height=12)


def _left_out_section(document: Document) -> Markup | None:
    left_out = document["left_out"]
    because = document["stopped_because"]
    if not left_out and not because:
        return None
    rows = [element("tr", element("td", _arm_names(each["arms"])), element("td", each["reason"])) for each in left_out]
    head = element("thead", element("tr", element("th", "not tried", scope="col"), element("th", "why", scope="col")))
    return _section(
        "What was left out, and why",
        element("p", f"The search ended: {because}.") if because else None,
        element("table", head, element("tbody", rows), class_="left-out") if rows else None,
    )


def _arm_names(names: Sequence[str]) -> Child:
    """Return the names of arms; of many, the first ones, and the others to be unfolded."""
    if len(names) <= _MOST_ARM_NAMES + 1:
        return "; ".join(names)
    first, others = names[:_MOST_ARM_NAMES], names[_MOST_ARM_NAMES:]
    return ["; ".join(first), element("details", element("summary", f"and {len(others)} more"), "; ".join(others))]


def _notes_section(document: Document) -> Markup | None:
    if not document["notes"]:
        return None
    return _section("How far the numbers reach", element("ul", [element("li", note) for note in document["notes"]]))


def _export_section(report: Report) -> Markup | None:
    if report.best is None or measurement(report.best) is None:
        return None
    made = make_export(report)
    return _section(
        "TrainingArguments to copy",
        element("p", "The same as ", element("code", f"autotune export {shlex.quote(report.study.name)}"), ":"),
        element("pre", element("code", render(made, "json").rstrip()), id="export", tabindex=0),
        element("ul", [element("li", line) for line in beside_lines(made)]),
    )


_COLUMNS = (("#", "number"), ("batch × acc", "number"), ("configuration", ""), ("samples/s", "number"),
            ("step", "number"), ("peak", "number"), ("took", "number"), ("result", ""))  # fmt: skip


def _trials_section(report: Report, log_link: Callable[[TrialRecord], Child] | None = None) -> Markup:
    columns = _COLUMNS if log_link is None else (*_COLUMNS, ("log", ""))
    head = [element("th", name, scope="col", class_=kind or None) for name, kind in columns]
    table = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", [_trial_row(report, trial, log_link) for trial in report.trials]),
    )
    # Scrolls on a narrow page, also with the keyboard.
    scrolling = element("div", table, class_="scroll", role="region", aria_label="all trials", tabindex=0)
    return _section(f"All {plural(len(report.trials), 'trial')}", scrolling)


def _trial_row(report: Report, trial: TrialRecord, log_link: Callable[[TrialRecord], Child] | None) -> Markup:
    measured = measurement(trial)
    step = format_seconds(measured.step_seconds) if measured else ""
    cells = (
        (str(trial.number), "number"),
        (batch_cell(trial.candidate), "number"),
        (trial.candidate.arm.describe(), "nowrap"),
        (speed_cell(trial.outcome), "number speed"),
        (step, "number"),
        (peak_cell(trial.outcome), "number"),
        (took_cell(trial), "number"),
        (verdict(report, trial), "verdict"),
    )
    kind = "best" if trial.id == report.study.best_trial_id else trial.state
    log = element("td", log_link(trial), class_="nowrap") if log_link is not None else None
    return element("tr", [element("td", text, class_=name) for text, name in cells], log, class_=kind)
