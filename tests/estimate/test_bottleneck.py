"""Test what limits a step: shares, kinds, and the lines of the report."""

import dataclasses

import pytest
from reported import BASELINE, BF16, completed, report, trial

from autotune.core.outcome import Completed, Measurement
from autotune.estimate.bottleneck import what_limits
from autotune.results.json_document import trial_document
from autotune.results.study_view import trial_view

COMPILED, PINNED = dataclasses.replace(BF16, torch_compile=True), dataclasses.replace(BF16, cpu_affinity=True)


def measurement_with(busy: float | None, data: float = 0.0) -> Measurement:
    """A step of a second."""
    return dataclasses.replace(completed(64.0).measurement, gpu_busy_share=busy, data_seconds=data)


@pytest.mark.parametrize(
    ("busy", "data", "kind"),
    [
        (0.46, 0.0, "host"),
        (0.46, 0.2, "host"),
        (0.46, 0.4, "data"),
        (0.95, 0.0, "gpu"),
        (0.9, 0.05, "gpu"),
        (None, 0.0, "unknown"),
        (None, 0.3, "unknown"),
        (None, 0.6, "data"),
    ],
)
def test_the_longest_wait_is_what_limits(busy: float | None, data: float, kind: str) -> None:
    limit = what_limits(measurement_with(busy, data))
    assert limit.kind == kind
    assert limit.data_share == pytest.approx(data)
    assert limit.factor == (None if busy is None else pytest.approx(1 / busy))
    if busy is not None and limit.host_share is not None:
        assert busy + data + limit.host_share == pytest.approx(1.0)


def test_the_document_has_the_shares() -> None:
    winner = trial(1, BF16, 32, Completed(measurement_with(0.46)))
    found = trial_document(trial_view(report(BASELINE, winner), winner))
    assert found["gpu_busy_share"] == 0.46
    assert found["limited_by"] == "host"
    assert found["cpu_core"] is None
