"""Compare predicted with measured peak memory of a rank, on two GPUs that train together. Needs no GPU.

    python studies/rank_memory.py [--only fsdp] [--models gpt2-medium] [--json]

The measured cells are those of ``studies/landscapes/*_2xh200_*.jsonl``: some of BERT-large that were measured by hand,
and those of four models that ``studies/ranks.py`` recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.candidate import STRATEGIES, Arm
from autotune.core.ceiling import Bounds
from autotune.core.workload import Task, Workload

LANDSCAPES = Path(__file__).parent / "landscapes"
_MIB = 1024**2
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class Recording:
    """The cells of one model that were measured on two GPUs."""

    model: str
    task: Task
    seq_len: int
    cells: list[dict[str, Any]]
    """With the names of ``TrainingArguments`` and ``peak_allocated_mib``; those that ran out of memory are left out."""


def recordings() -> list[Recording]:
    """Return everything that was recorded."""
    found = []
    for path in sorted(LANDSCAPES.glob("*_2xh200_*.jsonl")):
        meta, *cells = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        about = meta["workload"] if "workload" in meta else meta["meta"]
        same = {"precision": about.get("precision"), "ranks": 2, "transformer_layer_cls_to_wrap": "BertLayer"}
        completed = [{**same, **cell} for cell in cells if cell.get("state", "ok") == "ok"]
        found.append(Recording(about["model"], about["task"], about["seq_len"], completed))
    return found


def arm_of(cell: dict[str, Any]) -> Arm:
    """Return the arm of a cell."""
    is_sharded = cell["strategy"].startswith("fsdp")
    return Arm(
        cell["precision"],
        cell["gradient_checkpointing"],
        strategy=cell["strategy"],
        ranks=cell["ranks"],
        transformer_layer_cls_to_wrap=cell["transformer_layer_cls_to_wrap"] if is_sharded else None,
        sync_each_batch=cell.get("sync_each_batch", False),
    )


def compare(only: str | None, models: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return each measured cell with its predicted peaks and their relative errors."""
    from autotune.devices.gpus import CHIPS
    from autotune.models.resolve import resolve_model
    from autotune.space import training_arguments
    from autotune.worker.fake.predict import Limits
    from autotune.worker.fake.step import FakeTraining

    rows = []
    for recording in recordings():
        if models and recording.model not in models:
            continue
        config = resolve_model(recording.model).config
        workload = Workload(recording.model, config, recording.task, recording.seq_len)
        known: dict[Arm, Limits] = {}
        for cell in recording.cells:
            arm = arm_of(cell)
            if only not in (None, arm.strategy):
                continue
            # Those of DeepSpeed were measured with its own size of bucket.
            training_arguments.REDUCE_BUCKET_ELEMENTS = cell.get("reduce_bucket_elements", 0)
            if arm not in known:
                step = FakeTraining(workload, arm, CHIPS["h200"]).step()
                known[arm] = Limits(step, CHIPS["h200"], Bounds(_NO_LIMIT, _NO_LIMIT))
            told = known[arm].prediction(cell["per_device_train_batch_size"], cell["gradient_accumulation_steps"])
            row = {"model": recording.model, **cell}
            for what in ("allocated", "reserved"):
                predicted = getattr(told, f"peak_{what}_bytes") / _MIB
                row |= {f"predicted_{what}_mib": predicted, f"{what}_error": predicted / cell[f"peak_{what}_mib"] - 1}
            rows.append(row)
    return rows


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=STRATEGIES)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = compare(options.only, options.models)
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        name = f"{row['strategy']}{', checkpointing' if row['gradient_checkpointing'] else ''}"
        batch = f"{row['per_device_train_batch_size']} × {row['gradient_accumulation_steps']}"
        name += ", sync each batch" if row.get("sync_each_batch") else ""
        allocated = f"{row['predicted_allocated_mib']:9,.0f} of {row['peak_allocated_mib']:6,.0f} MiB"
        reserved = f"{row['predicted_reserved_mib']:9,.0f} of {row['peak_reserved_mib']:6,.0f} MiB"
        errors = f"{row['allocated_error']:+.2%}", f"{row['reserved_error']:+.2%}"
        print(
            f"{row['model']:22} {name:26} {batch:6} allocated {allocated} {errors[0]}   reserved {reserved} {errors[1]}"
        )
    for what in ("allocated", "reserved"):
        off = sorted(abs(row[f"{what}_error"]) for row in rows)
        print(f"{what}: {len(off)} peaks, median {statistics.median(off):.2%}, worst {off[-1]:.2%}")


if __name__ == "__main__":
    main()
