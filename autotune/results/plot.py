"""Plot a study with matplotlib, an optional package that only this module uses."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from autotune.core.errors import InvalidRequestError
from autotune.core.installation import how_to_add
from autotune.core.units import GIB, MIB
from autotune.results.chart_data import SpeedChart, speed_chart
from autotune.results.report import Report

_MARKERS = "os^Dp"


def plot_trials(report: Report) -> Any:
    """Plot samples a second against peak memory with a marker for each trial and a line for each arm.

    Returns the matplotlib ``Axes`` of a new figure. Raises ``InvalidRequestError`` where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequestError("a plot needs matplotlib, which is not installed", how_to_add("plot"))
    axes = importlib.import_module("matplotlib.pyplot").subplots(layout="constrained")[1]
    chart = speed_chart(report)
    most = max((p.peak_bytes for p in chart.points), default=0) if chart.leaves_ceiling_out else chart.cap_bytes
    unit, name = (GIB, "GiB") if most >= 2 * GIB else (MIB, "MiB")
    for number in range(len(chart.arms)):
        _plot_arm(axes, chart, number, unit)
    if chart.leaves_ceiling_out:
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
    # Candidates that ran out have no speed. They are stacked at the ceiling.
    heights = [0.03 * (place + 1) for place, over in enumerate(chart.over) if over.arm == number]
    axes.plot(
        [chart.cap_bytes / unit] * len(heights),
        heights,
        linestyle="",
        marker="x",
        color=color,
        transform=axes.get_xaxis_transform(),
    )
