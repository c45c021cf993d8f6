"""What the ranks of a stock run measured, merged."""

from __future__ import annotations

from typing import Any

from autotune.worker.verify.torchrun import merge


def answer(seconds: float, peak: int, **changes: Any) -> dict[str, Any]:
    """What one rank says."""
    stretch = {"seconds": seconds, "steps": 5, "samples": 40, "new_shapes": 0}
    said = {
        "state": "completed",
        "stretches": [stretch],
        "peak_bytes": {"end": {"allocated": peak, "reserved": 2 * peak}},
    }
    return {**said, "joules_per_sample": None, "skipped_steps": 0, "loss_problem": None, **changes}


def test_samples_of_all_time_of_the_slowest_peak_of_the_largest() -> None:
    merged = merge([answer(1.0, 300), answer(1.5, 200)], 0)
    assert merged["stretches"] == [{"seconds": 1.5, "steps": 5, "samples": 80, "new_shapes": 0}]
    assert merged["peak_bytes"] == {"end": {"allocated": 300, "reserved": 600}}


def test_a_rank_that_failed_speaks_for_all() -> None:
    lost = {"state": "failed", "message": "connection closed", "during": "train"}
    full = {"state": "out_of_memory", "message": "no memory", "during": "train"}
    assert merge([lost, full], 1)["message"] == "rank 1: no memory"
    assert merge([answer(1.0, 1), lost], 1)["message"] == "rank 1: connection closed"
    silent = merge([answer(1.0, 1), None], 1)
    assert silent["message"] == "rank 1 gave no answer, and torchrun ended with exit code 1"
