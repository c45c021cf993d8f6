"""Test the plot of a study, where matplotlib is installed."""

from __future__ import annotations

import pytest
from reported import BASELINE, FP16, OVER, WINNER, completed, report, trial

from autotune.results.chart_data import plot_trials


def test_the_picture_has_the_ceiling_and_every_arm() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    axes = plot_trials(report(BASELINE, WINNER, OVER, trial(3, FP16, 32, completed(300.0, 22.9))))
    (legend,) = axes.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert {"fp32", "bf16", "fp16"} < set(names)
    assert any(name.startswith("ceiling 23.0 GiB") for name in names)
    assert axes.get_xlabel().startswith("peak memory (GiB)")
    assert axes.get_ylabel() == "samples/s"
    axes.figure.canvas.draw()
