"""What the ranks of a stock run measured, merged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autotune.worker.verify import torchrun
from autotune.worker.verify.torchrun import merge, run_with_torchrun


def answer(seconds: float, peak: int, **changes: Any) -> dict[str, Any]:
    """What one rank says."""
    stretch = {"seconds": seconds, "steps": 5, "samples": 40, "new_shapes": 0}
    said = {
        "state": "completed",
        "stretches": [stretch],
        "peak_bytes": {"end": {"allocated": peak, "reserved": 2 * peak}},
    }
    return {**said, "joules_per_sample": None, "skipped_steps": 0, "loss_problem": None, **changes}


RANK = """
import json, os, pathlib, sys
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
job = json.loads((folder / "job.json").read_text())
assert os.environ["WORLD_SIZE"] == "2" and os.listdir(job["output_dir"]) == []
if rank in job["silent"]:
    sys.exit(3)
(folder / f"rank-{rank}.json").write_text(json.dumps(job["answer"]))
"""


@pytest.mark.parametrize("silent", [[], pytest.param([1], marks=pytest.mark.whole)])
def test_torchrun_starts_the_ranks(silent: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answering_rank.py").write_text(RANK)
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(torchrun, "_RANK_MODULE", "answering_rank")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    job = {"output_dir": str(tmp_path / "job"), "ranks": 2, "answer": answer(1.0, 300), "silent": silent}
    merged = run_with_torchrun(job)
    if silent:
        assert merged["message"] == "rank 1 gave no answer, and torchrun ended with exit code 1"
    else:
        assert merged == merge([answer(1.0, 300)] * 2, 0)


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
