"""Test what limits a step: shares, kinds, and the lines of the report."""

import dataclasses
from typing import Any

import pytest
from reported import BASELINE, BF16, WORKLOAD, completed, report, trial

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, Measurement
from autotune.estimate.bottleneck import describe_limit, what_limits
from autotune.results.json_document import trial_document
from autotune.results.report import Report
from autotune.results.study_view import trial_view
from autotune.results.text import summary_lines
from autotune.results.warnings import notes
from autotune.store.records import TrialRecord

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


@pytest.mark.parametrize(
    ("candidate", "line"),
    [
        (
            Candidate(BF16, 8, 8),
            "the GPU computes 46 % of a step; the rest waits for the host: fewer and larger micro-steps, "
            "torch.compile, one core for all threads or a faster core would help, by up to 2.2 ×",
        ),
        (
            Candidate(dataclasses.replace(COMPILED, cpu_affinity=True), 8),
            "the GPU computes 46 % of a step; the rest waits for the host: larger batches or a faster core would help, "
            "by up to 2.2 ×",
        ),
    ],
)
def test_one_line_says_what_would_help(candidate: Candidate, line: str) -> None:
    assert describe_limit(candidate, measurement_with(0.46)) == line


def test_waiting_for_data_is_told_apart() -> None:
    line = describe_limit(Candidate(BF16, 8), measurement_with(0.5, 0.45))
    assert line == "the GPU computes 50 % of a step; the rest waits for data: faster loading would help, by up to 2.0 ×"


def test_a_busy_gpu_needs_no_advice() -> None:
    assert describe_limit(Candidate(BF16, 8), measurement_with(0.97)) == "the GPU computes 97 % of a step"
    assert describe_limit(Candidate(BF16, 8), measurement_with(None)) is None


def trial_at(number: int, arm: Arm, rate: float, busy: float | None) -> TrialRecord:
    """A trial of 32 × 2."""
    outcome = completed(rate)
    return trial(
        number, arm, 32, Completed(dataclasses.replace(outcome.measurement, gpu_busy_share=busy, data_seconds=0.0))
    )


def host_bound(*more: TrialRecord, **changes: Any) -> Report:
    return report(BASELINE, trial_at(1, BF16, 200.0, 0.46), *more, **changes)


class TestReport:
    def test_the_summary_has_the_line(self) -> None:
        lines = summary_lines(host_bound())
        assert any(line.startswith("  the GPU computes 46 % of a step") for line in lines)
        unknown = summary_lines(report(BASELINE, trial_at(1, BF16, 200.0, None)))
        assert not any("GPU computes" in line for line in unknown)

    def test_the_document_has_the_shares(self) -> None:
        found = trial_document(trial_view(host_bound(), host_bound().trials[1]))
        assert found["gpu_busy_share"] == 0.46
        assert found["limited_by"] == "host"
        assert found["cpu_core"] is None

    def test_compiling_is_named_where_it_was_not_tried(self) -> None:
        assert any("--effort default" in note for note in notes(host_bound()))
        assert not any("--effort" in note for note in notes(host_bound(effort="default")))
        busy = report(BASELINE, trial_at(1, BF16, 200.0, 0.95))
        assert not any("--effort" in note for note in notes(busy))

    @pytest.mark.parametrize(
        ("arm", "speed", "told"),
        [
            (COMPILED, 230.0, "compiled, the winner is 1.15 ×"),
            (PINNED, 230.0, "pinned to one core, the winner is 1.15 ×"),
            (PINNED, 180.0, "pinned to one core, the winner is 0.90 ×"),
        ],
    )
    def test_what_was_tried_is_told_with_its_gain_or_loss(self, arm: Arm, speed: float, told: str) -> None:
        found = notes(host_bound(trial_at(2, arm, speed, 0.6), torch_compile="auto"))
        assert f"{told} as fast as without" in found

    def test_so_is_what_all_levers_of_the_winner_gained(self) -> None:
        graphed = dataclasses.replace(BF16, cuda_graphs=True, unpadded=True)
        found = notes(report(BASELINE, trial_at(1, BF16, 200.0, 0.46), trial_at(2, graphed, 300.0, 0.8), best=2))
        assert "with its levers the winner is 1.50 × as fast as without (bf16)" in found

    def test_ones_own_data_does_not_contradict_it(self) -> None:
        own = dataclasses.replace(host_bound(), workload={**WORKLOAD, "task": "own", "model": "train.py:build"})
        text = "\n".join(summary_lines(own))
        assert "computing, not the data loader" not in text
        assert "0.0% of a step is spent waiting for data" in text
