"""Predicts the cells of recorded landscapes: ``python predict_recorded.py ARMS:FILE…`` prints one JSON object a cell.

ARMS are the numbers of the arms to predict, such as 02 for the first and the third.

A program of its own, because fake training patches torch for good.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from autotune.core.candidate import Arm
from autotune.core.ceiling import Bounds
from autotune.core.workload import Workload
from autotune.devices.gpus import CHIPS
from autotune.models.resolve import resolve_model
from autotune.worker.fake.predict import Limits
from autotune.worker.fake.step import FakeTraining

MIB = 1024**2
_ARM_FIELDS = ("precision", "gradient_checkpointing", "attn_implementation", "optim")


def predicted(numbers: str, file: str) -> Iterator[dict[str, Any]]:
    """Each completed cell with what is predicted for it; each arm's last cell bears its largest batch."""
    with open(file) as lines:
        meta, *cells = (json.loads(line) for line in lines)
    facts = meta["workload"]
    workload = Workload(facts["model"], resolve_model(facts["model"]).config, facts["task"], facts["seq_len"])
    arms: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        arms.setdefault(tuple(cell[name] for name in _ARM_FIELDS), []).append(cell)
    for number, (arm, rows) in enumerate(arms.items()):
        if str(number) not in numbers:
            continue
        step = FakeTraining(workload, Arm(*arm), CHIPS["h200"]).step()
        limits = Limits(step, CHIPS["h200"], Bounds(meta["cap_bytes"], meta["line_bytes"]))
        largest = limits.largest_batch(8)
        fitting = [
            row["per_device_train_batch_size"]
            for row in rows
            if row["state"] == "ok"
            and row["gradient_accumulation_steps"] == 1
            and row["peak_reserved_mib"] * MIB <= meta["line_bytes"]
        ]
        for row in rows:
            if row["state"] == "ok":
                accumulation = row["gradient_accumulation_steps"]
                run = row.get("micro_steps_run", accumulation)
                prediction = limits.prediction(row["per_device_train_batch_size"], run)
                yield {
                    "model": facts["model"],
                    "arm": arm,
                    "accumulation": accumulation,
                    "batch": row["per_device_train_batch_size"],
                    "allocated_mib": prediction.peak_allocated_bytes / MIB,
                    "measured_allocated_mib": row["peak_allocated_mib"],
                    "reserved_mib": prediction.peak_reserved_bytes / MIB,
                    "measured_reserved_mib": row["peak_reserved_mib"],
                    "largest": largest,
                    "measured_largest": max(fitting, default=0),
                }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for cell in predicted(*name.split(":", 1)):
            print(json.dumps(cell), flush=True)
