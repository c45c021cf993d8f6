"""Test which cells ``studies/ranks.py`` measures first, and that a part that fails leaves the others alone."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import ranks
import ranks_report
from searching import BERT_LARGE, FACTS, H200, MODEL

from autotune.core.candidate import Arm, Candidate
from autotune.tuning.prepare import prepare
from autotune.tuning.request import SearchRequest

SECOND = dataclasses.replace(H200, uuid="GPU-1", index=1)


def test_the_largest_batches_of_all_strategies_come_first() -> None:
    request = SearchRequest(
        BERT_LARGE, H200, others=(SECOND,), effective_batch=64, world_size=2, precisions=("bf16", "tf32")
    )
    facts = dataclasses.replace(FACTS, model=dataclasses.replace(MODEL, layer_classes=("BertLayer",)))
    cells = ranks._cells(prepare(request, facts), ("bf16", "tf32"))
    told = [
        (c.arm.strategy, c.arm.precision, c.arm.gradient_checkpointing, c.per_device_train_batch_size) for c in cells
    ]
    strategies = ("ddp", "fsdp-keep", "fsdp")
    assert told[:3] == [(strategy, "bf16", False, 32) for strategy in strategies]
    assert told[3:6] == [(strategy, "bf16", True, 32) for strategy in strategies]
    # Without accumulation there is nothing that could be synchronized more often.
    assert all(cell.accumulates for cell in cells if cell.arm.sync_each_batch)
    assert len(set(cells)) == len(cells)


def test_a_part_that_fails_is_recorded_and_the_next_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ranks.py", str(tmp_path), "--cpu", "--workloads", "bert-tiny"])
    study = ranks.Study(ranks._options())
    study.run("search", "bert-tiny", lambda: {}["nothing"])
    study.run("grid", "bert-tiny", lambda: {"cells": 3})
    parts = json.loads((tmp_path / "ranks.json").read_text())["parts"]
    assert parts["search"]["bert-tiny"]["error"] == "KeyError: 'nothing'"
    assert parts["grid"]["bert-tiny"]["cells"] == 3


def test_predictions_that_came_after_a_cell_are_compared_with_it(tmp_path: Path) -> None:
    arm = {"strategy": "fsdp", "precision": "bf16", "gradient_checkpointing": False, "sync_each_batch": False}
    cell = {**arm, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    lines = [
        {"meta": True},
        {**cell, "state": "ok", "peak_allocated_mib": 1000.0, "peak_reserved_mib": 2000.0},
        {**cell, "per_device_train_batch_size": 32, "state": "oom"},
        {**cell, "per_device_train_batch_size": 64, "state": "predicted over", "predicted_allocated_mib": 9e9},
        {**cell, "prediction": True, "predicted_allocated_mib": 1010.0, "predicted_reserved_mib": 1900.0},
    ]
    path = tmp_path / "bert_grid.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells = ranks_report.cells_of(path)
    assert [each["state"] for each in cells] == ["ok", "oom"]
    assert ranks_report.errors_of(cells, "allocated") == pytest.approx([0.01])
    assert ranks_report.errors_of(cells, "reserved") == pytest.approx([-0.05])
    assert ranks_report.name_of(cells[0]) == "fsdp bf16 16 × 2"


def test_trials_beside_others_are_compared_with_the_same_alone() -> None:
    cells = [Candidate(Arm("bf16"), batch, 64 // batch) for batch in (8, 16, 32)]
    found = {
        "together": {"grid_seconds": 18.0, "grid_trials": 3, "whole_seconds": 40.0, "exit_code": 0},
        "alone": {"grid_seconds": 24.0, "grid_trials": 2, "whole_seconds": 60.0, "exit_code": 130},
    }
    speeds = {
        "together": dict(zip(cells, (99.0, 200.0, 330.0), strict=True)),
        "alone": {cells[0]: 100.0, cells[2]: 300.0},
    }
    told = ranks._compared(found, speeds)
    # A second command that was cut short is compared trial by trial, and not as a whole.
    assert told["grid_ratio"] == 0.5
    assert "whole_ratio" not in told
    assert [each["cell"] for each in told["speeds"]] == [cells[0].describe(), cells[2].describe()]
    assert (told["speed_difference_median"], told["speed_difference_worst"]) == (0.045, 0.1)
