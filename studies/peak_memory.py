"""Compare predicted with measured peak memory, cell by cell, for one GPU and for a rank of two. Needs no GPU.

    python studies/peak_memory.py [FILE.jsonl[:ARMS] …] [--models NAME …] [--json]

Without a file, all recordings of peaks in ``studies/landscapes``: up to where memory ends (``*_boundary.jsonl``, which
``studies/record.py`` writes), with accumulation up to 32 (``memory_cells_h200.jsonl``), and on two GPUs
(``*_2xh200_*.jsonl``). ARMS are the numbers of the arms of each model to predict, such as 02 for the first and the
third.

Fake training patches torch for good, so that this is a program of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorded_steps import LANDSCAPES, Subject, read_lines

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.ceiling import Bounds
from autotune.devices.gpus import CHIPS
from autotune.space import training_arguments
from autotune.worker.fake.step import FakeTraining, Limits

_MIB = 1024**2
_NO_LIMIT = Bounds(2**60, 2**60)
_PEAKS = ("allocated", "reserved")


@dataclass(frozen=True)
class Measured:
    """A completed trial with its peaks."""

    model: str
    task: Any
    seq_len: int | None
    candidate: Candidate
    peak_mib: dict[str, float]
    bounds: Bounds | None
    """Those of the recording where it went up to them."""
    micro_steps: int
    bucket_elements: int
    """What DeepSpeed's bucket was."""


@functools.cache
def _limits(
    model: str, task: Any, seq_len: int | None, arm: Arm, bounds: Bounds | None, bucket_elements: int
) -> Limits:
    """Trace a step of a model with random weights and synthetic data, once for all recordings of it."""
    workload = Subject(model, seq_len, task).workload()
    training_arguments.REDUCE_BUCKET_ELEMENTS = bucket_elements
    return Limits(FakeTraining(workload, arm, CHIPS["h200"]).step(), CHIPS["h200"], bounds or _NO_LIMIT)


def recorded(path: Path) -> Iterator[Measured]:
    """Yield the completed trials of a recording, in order."""
    rows = read_lines(path)
    about: Document = next((row for row in rows if "meta" in row), {})
    common = about.get("workload") or (about["meta"] if isinstance(about.get("meta"), dict) else about)
    is_boundary = path.stem.endswith("_boundary")
    for row in rows:
        if "per_device_train_batch_size" not in row or row.get("state", "ok") not in ("ok", "completed"):
            continue
        cell = {"precision": common.get("precision"), "ranks": common.get("ranks", 1)} | row
        accumulation = int(cell["gradient_accumulation_steps"])
        in_mib = {name: cell.get(f"peak_{name}_mib") or cell[f"peak_{name}_bytes"] / _MIB for name in _PEAKS}
        yield Measured(
            cell.get("model") or common.get("model") or path.name.partition("_")[0],
            cell["task"] if "task" in cell else common["task"],
            cell["seq_len"] if "seq_len" in cell else common["seq_len"],
            Candidate(_arm_of(cell), int(cell["per_device_train_batch_size"]), accumulation),
            in_mib,
            Bounds(about["cap_bytes"], about["line_bytes"]) if is_boundary else None,
            cell.get("micro_steps_run", accumulation) if is_boundary else accumulation,
            cell.get("reduce_bucket_elements", 0),
        )


def _arm_of(cell: Document) -> Arm:
    """Return a recorded cell's arm, with the fields that decide its memory."""
    arm = Candidate.from_parameters({**cell, "ddp_find_unused_parameters": None}).arm
    if cell.get("strategy", "").startswith("fsdp") and arm.transformer_layer_cls_to_wrap is None:
        # Measured by hand, for one model.
        return Candidate.from_parameters({**cell, "transformer_layer_cls_to_wrap": "BertLayer"}).arm
    return arm


def predicted(path: Path, arms: str = "", models: list[str] | None = None) -> Iterator[Document]:
    """Yield each measured cell with its prediction; for a boundary also the largest fitting batches."""
    numbers: dict[str, list[Arm]] = {}
    cells = [cell for cell in recorded(path) if not models or cell.model in models]
    for cell in cells:
        arm, batch = cell.candidate.arm, cell.candidate.per_device_train_batch_size
        of_model = numbers.setdefault(cell.model, [])
        if arm not in of_model:
            of_model.append(arm)
        if arms and str(of_model.index(arm)) not in arms:
            continue
        limits = _limits(cell.model, cell.task, cell.seq_len, arm, cell.bounds, cell.bucket_elements)
        told = limits.prediction(batch, cell.micro_steps)
        row: Document = {"model": cell.model, "arm": arm.describe(), "candidate": cell.candidate.describe()}
        row |= {"strategy": arm.strategy, "accumulation": cell.candidate.gradient_accumulation_steps}
        for name in _PEAKS:
            row[f"{name}_mib"] = cell.peak_mib[name]
            row[f"{name}_error"] = getattr(told, f"peak_{name}_bytes") / _MIB / cell.peak_mib[name] - 1
        if cell.bounds is not None:
            row["largest"], row["measured_largest"] = limits.largest_batch(8), _largest(cells, cell)
        yield row


def _largest(cells: list[Measured], of: Measured) -> int:
    """Return the largest batch of an arm that was measured below the line."""
    assert of.bounds is not None
    return max(
        (
            cell.candidate.per_device_train_batch_size
            for cell in cells
            if (cell.model, cell.candidate.arm) == (of.model, of.candidate.arm)
            and not cell.candidate.accumulates
            and cell.peak_mib["reserved"] * _MIB <= of.bounds.line_bytes
        ),
        default=0,
    )


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE.jsonl[:ARMS]")
    parser.add_argument("--models", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    every = [
        path for kind in ("*_boundary", "memory_cells_*", "*_2xh200_*") for path in LANDSCAPES.glob(f"{kind}.jsonl")
    ]
    rows = []
    for text in options.files or sorted(map(str, every)):
        file, _, arms = text.partition(":")
        for row in predicted(Path(file), arms, options.models):
            rows.append(row)
            peaks = [f"{name} {row[f'{name}_mib']:9,.0f} MiB {row[f'{name}_error']:+7.2%}" for name in _PEAKS]
            line = f"{row['model']:34} {row['candidate']:50} {'   '.join(peaks)}"
            print(json.dumps(row) if options.json else line, flush=True)
    for name in () if options.json or not rows else _PEAKS:
        off = sorted(abs(row[f"{name}_error"]) for row in rows)
        near = sum(error <= 0.03 for error in off)
        print(f"{name}: {len(off)} peaks, median {statistics.median(off):.2%}, worst {off[-1]:.2%}, in 3 %: {near}")


if __name__ == "__main__":
    main()
