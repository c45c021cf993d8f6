"""A study as a picture; the one place that knows matplotlib, which is an extra."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from autotune.errors import InvalidRequestError
from autotune.report import Report, measurement
from autotune.trial import OutOfMemory


def plot_trials(report: Report) -> Any:
    """Samples a second over the per-device batch, a line an arm; ``×`` at the bottom where memory ran out.

    Returns matplotlib ``Axes`` of a figure of its own; ``InvalidRequestError`` where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequestError("a plot needs matplotlib, which is not installed", "pip install 'autotune[plot]'")
    axes = importlib.import_module("matplotlib.pyplot").subplots(layout="constrained")[1]
    for arm in dict.fromkeys(trial.candidate.arm for trial in report.trials):
        trials = [trial for trial in report.trials if trial.candidate.arm == arm]
        points = sorted(
            (trial.candidate.per_device_train_batch_size, found.samples_per_second, found.relative_spread)
            for trial in trials
            if (found := measurement(trial)) is not None
        )
        over = [t.candidate.per_device_train_batch_size for t in trials if isinstance(t.outcome, OutOfMemory)]
        batches, speeds = [point[0] for point in points], [point[1] for point in points]
        spreads = [speed * spread for _, speed, spread in points]
        line = axes.errorbar(batches, speeds, yerr=spreads, marker="o", capsize=3, label=arm.describe())
        axes.plot(over, [0.0] * len(over), linestyle="", marker="x", color=line[0].get_color())
    best = report.best
    found = measurement(best)
    if best is not None and found is not None:
        batch = best.candidate.per_device_train_batch_size
        axes.plot([batch], [found.samples_per_second], marker="o", markersize=14, fillstyle="none", color="black")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("per-device batch (× where memory ran out)")
    axes.set_ylabel("samples/s")
    axes.set_title(f"{report.study.name}, {report.environment['device_name']}")
    axes.legend()
    return axes
