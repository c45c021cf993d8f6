"""Compare predicted with measured peak memory of a rank, on two GPUs that train together. Needs no GPU.

    python studies/rank_memory.py [--only fsdp] [--json]

The measured cells are those of ``studies/landscapes/bert-large-uncased_2xh200_cap23.5GiB.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "landscapes" / "bert-large-uncased_2xh200_cap23.5GiB.jsonl"
_MIB = 1024**2
_NO_LIMIT = 2**60


def compare(only: str | None) -> list[dict[str, Any]]:
    """Return each measured cell with its predicted peaks and their relative errors."""
    from autotune.core.candidate import Arm
    from autotune.core.workload import Workload
    from autotune.devices.gpus import CHIPS
    from autotune.models.resolve import resolve_model
    from autotune.worker.fake.predict import Limits
    from autotune.worker.fake.step import FakeTraining

    meta, *cells = map(json.loads, RECORDED.read_text().splitlines())
    meta = meta["meta"]
    workload = Workload(meta["model"], resolve_model(meta["model"]).config, meta["task"], meta["seq_len"])
    known: dict[Arm, Limits] = {}
    rows = []
    for cell in cells:
        strategy = cell["strategy"]
        if only not in (None, strategy):
            continue
        layers = None if strategy == "ddp" else "BertLayer"
        arm = Arm(
            meta["precision"],
            cell["gradient_checkpointing"],
            strategy=strategy,
            ranks=meta["ranks"],
            transformer_layer_cls_to_wrap=layers,
        )
        if arm not in known:
            known[arm] = Limits(FakeTraining(workload, arm, CHIPS["h200"]).step(), CHIPS["h200"], _NO_LIMIT, _NO_LIMIT)
        told = known[arm].prediction(cell["per_device_train_batch_size"], cell["gradient_accumulation_steps"])
        row = {**cell}
        for what in ("allocated", "reserved"):
            predicted = getattr(told, f"peak_{what}_bytes") / _MIB
            row |= {f"predicted_{what}_mib": predicted, f"{what}_error": predicted / cell[f"peak_{what}_mib"] - 1}
        rows.append(row)
    return rows


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("ddp", "fsdp", "fsdp-keep"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = compare(options.only)
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        name = f"{row['strategy']}{', checkpointing' if row['gradient_checkpointing'] else ''}"
        batch = f"{row['per_device_train_batch_size']} × {row['gradient_accumulation_steps']}"
        allocated = f"{row['predicted_allocated_mib']:9,.0f} of {row['peak_allocated_mib']:6,} MiB"
        reserved = f"{row['predicted_reserved_mib']:9,.0f} of {row['peak_reserved_mib']:6,} MiB"
        errors = f"{row['allocated_error']:+.2%}", f"{row['reserved_error']:+.2%}"
        print(f"{name:22} {batch:6} allocated {allocated} {errors[0]}   reserved {reserved} {errors[1]}")


if __name__ == "__main__":
    main()
