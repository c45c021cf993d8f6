"""What the ranks of a stock run measured, merged."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_workload

from autotune.core.placement import RankDevices
from autotune.core.schema import encode
from autotune.core.verification import PeakBytes, StockResult, StockWork, Stretch
from autotune.worker.verify import torchrun
from autotune.worker.verify.torchrun import merge, run_with_torchrun


def answer_of_rank(seconds: float, peak: int, **changes: Any) -> StockResult:
    """What one rank says."""
    stretch = Stretch(steps=5, samples=40, seconds=seconds, new_shapes=0)
    peaks = {"end": PeakBytes(peak, 2 * peak)}
    said = StockResult("completed", stretches=(stretch,), peak_bytes=peaks, skipped_steps=0)
    return dataclasses.replace(said, **changes)


RANK = """
import json, os, pathlib, sys
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
told = json.loads((folder / "work.json").read_text())["arguments"]
assert os.environ["WORLD_SIZE"] == "2" and os.listdir(folder / "training") == []
if rank in told["silent"]:
    sys.exit(3)
(folder / f"rank-{rank}.json").write_text(json.dumps(told["answer"]))
"""


@pytest.mark.parametrize("silent", [[], pytest.param([1], marks=pytest.mark.whole)])
def test_torchrun_starts_the_ranks(silent: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answering_rank.py").write_text(RANK)
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(torchrun, "_RANK_MODULE", "answering_rank")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    told = {"answer": encode(answer_of_rank(1.0, 300)), "silent": silent}
    devices = RankDevices("cpu", ("cpu", "cpu"))
    work = StockWork(tiny_workload("bert-tiny"), devices, told, "eager", 42, 20, context_parallel=2)
    merged = run_with_torchrun(work, str(tmp_path / "job"))
    if silent:
        assert merged.message == "rank 1 gave no answer, and torchrun ended with exit code 1"
    else:
        assert merged == merge([answer_of_rank(1.0, 300)] * 2, 0, shared_by=2)


def test_samples_of_all_time_of_the_slowest_peak_of_the_largest() -> None:
    merged = merge([answer_of_rank(1.0, 300), answer_of_rank(1.5, 200)], 0)
    assert merged.stretches == (Stretch(steps=5, samples=80, seconds=1.5, new_shapes=0),)
    assert merged.peak_bytes == {"end": PeakBytes(300, 600)}
    assert merged.joules_per_sample is None
    thrifty, wasteful = (answer_of_rank(1.0, 1, joules_per_sample=joules) for joules in (2.0, 4.0))
    assert merge([thrifty, wasteful], 0).joules_per_sample == 3


def test_a_sample_that_ranks_share_counts_once() -> None:
    """Each of four ranks had 40 samples, in two pairs, and each GPU drew 3 joules for each of its samples."""
    merged = merge([answer_of_rank(1.0, 300, joules_per_sample=3.0)] * 4, 0, shared_by=2)
    assert merged.stretches[0].samples == 80
    assert merged.joules_per_sample == 6


def test_skipped_updates_that_are_not_known_are_not_none_at_all() -> None:
    for skipped, told in (((2, 2), 2), ((None, None), None)):
        assert merge([answer_of_rank(1.0, 1, skipped_steps=each) for each in skipped], 0).skipped_steps == told


def test_a_rank_that_failed_speaks_for_all() -> None:
    lost = StockResult("failed", "connection closed", "train")
    full = StockResult("out_of_memory", "no memory", "train")
    assert merge([lost, full], 1).message == "rank 1: no memory"
    assert merge([answer_of_rank(1.0, 1), lost], 1).message == "rank 1: connection closed"
    silent = merge([answer_of_rank(1.0, 1), None], 1)
    assert silent.message == "rank 1 gave no answer, and torchrun ended with exit code 1"
