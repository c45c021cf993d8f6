"""Test which cells ``studies/ranks.py`` measures first, and that a part that fails leaves the others alone."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import ranks
from searching import BERT_LARGE, FACTS, H200, MODEL

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
