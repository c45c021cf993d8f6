"""The table of the guide "Methods and tools for efficient training on a single GPU", as one reproducible study.

    python studies/guide.py [--model bert-large-uncased] [--seq-len 512] [--samples 512] [--device cuda:0]
                            [--rows vanilla,fp16] [--dtype float32] [--json FILE]

Every row is one real Trainer run of so many samples in a process of its own, measured from its first step to its
last. GPU memory is what the whole device had in use after it, as the guide reads it, beside what torch allocated.
A row whose package is not installed, or that the device cannot do, says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.core.candidate import Arm, Candidate, Precision
from autotune.core.errors import InvalidRequestError
from autotune.core.outcome import Completed, Effort, Failed, Outcome
from autotune.core.schema import encode
from autotune.core.units import MIB, format_bytes
from autotune.core.workload import Workload
from autotune.devices import Device, find_device
from autotune.execution import TrialJob, TrialServer, run_trial
from autotune.models.resolve import resolve_model
from autotune.models.tasks import choose_seq_len, infer_task
from autotune.space.features import how_to_install, require, version_of
from autotune.space.levers import packages_of

# The guide's batch: every row's optimizer step sees four samples, at once or one by one.
_BATCH = 4
_SEED = 42
_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    candidate: Candidate


def _row(
    name: str,
    precision: Precision = "fp32",
    optim: str = "adamw_torch",
    *,
    accumulates: bool = False,
    checkpointing: bool = False,
) -> Row:
    arm = Arm(precision, checkpointing, optim=optim)
    return Row(name, Candidate(arm, 1, _BATCH) if accumulates else Candidate(arm, _BATCH))


ROWS: tuple[Row, ...] = (
    _row("vanilla"),
    _row("accumulation", accumulates=True),
    _row("accumulation+checkpointing", accumulates=True, checkpointing=True),
    _row("fp16", "fp16"),
    _row("bf16", "bf16"),
    _row("tf32", "tf32"),
    _row("fp16+accumulation", "fp16", accumulates=True),
    _row("fp16+accumulation+checkpointing", "fp16", accumulates=True, checkpointing=True),
    _row("adafactor", optim="adafactor"),
    _row("8-bit-adam", optim="adamw_bnb_8bit"),
    _row("8-bit-adam-torchao", optim="adamw_torch_8bit"),
    _row("all-together+adafactor", "fp16", "adafactor", accumulates=True, checkpointing=True),
    _row("all-together+8-bit-adam", "fp16", "adamw_bnb_8bit", accumulates=True, checkpointing=True),
    _row("all-together+8-bit-adam-torchao", "fp16", "adamw_torch_8bit", accumulates=True, checkpointing=True),
)


def whole_run(samples: int) -> Effort:
    """Every step of a run over so many samples, none dropped, none added up."""
    steps = samples // _BATCH
    return Effort(0, steps, steps, target_spread=0.0, max_seconds=_TIMEOUT_SECONDS, max_micro_steps=_BATCH)


def _lacking(row: Row, device: Device) -> str | None:
    """Why a row cannot be run here."""
    precision = row.candidate.arm.precision
    if precision not in device.precisions:
        return f"{device.name} has no {precision}"
    for package in packages_of(row.candidate.arm):
        try:
            require(package, row.name)
        except InvalidRequestError as error:
            return f"{package} is not installed: {error.hint or how_to_install(package)}"
    return None


def _document(row: Row, outcome: Outcome, samples: int) -> dict[str, Any]:
    document: dict[str, Any] = {"row": row.name, **row.candidate.parameters()}
    if not isinstance(outcome, Completed):
        state = "failed" if isinstance(outcome, Failed) else "out of memory"
        return {**document, "state": state, "message": outcome.message}
    measured = outcome.measurement
    seconds = sum(measured.step_seconds_each)
    return {
        **document,
        "state": "ok",
        "seconds": round(seconds, 3),
        "samples_per_second": round(samples / seconds, 3),
        # Without the first step, in which kernels are chosen and, by torchao, compiled.
        "steady_samples_per_second": round(measured.samples_per_second, 3),
        "first_step_seconds": round(measured.step_seconds_each[0], 3),
        "device_used_bytes": measured.device_used_bytes,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "peak_allocated_bytes": measured.peak_allocated_bytes,
        "train_loss": measured.train_loss,
    }


def _cells(document: dict[str, Any]) -> tuple[str, ...]:
    batch = f"{document['per_device_train_batch_size']} × {document['gradient_accumulation_steps']}"
    if document["state"] != "ok":
        return document["row"], batch, f"{document['state']}: {document['message']}", *("",) * (len(_HEAD) - 3)
    used = document["device_used_bytes"]
    return (
        document["row"],
        batch,
        f"{document['seconds']:.2f}",
        f"{document['samples_per_second']:.2f}",
        f"{used / MIB:,.0f}" if used else "",
        f"{document['peak_reserved_bytes'] / MIB:,.0f}",
        f"{document['peak_allocated_bytes'] / MIB:,.0f}",
    )


_HEAD = ("row", "batch × acc", "time (s)", "samples/s", "GPU memory (MiB)", "reserved (MiB)", "allocated (MiB)")


def table(documents: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [_HEAD, tuple("---" for _ in _HEAD), *(_cells(document) for document in documents)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Run the rows, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-large-uncased")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", help=f"some of {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    options = parser.parse_args()
    if options.samples < _BATCH or options.samples % _BATCH:
        parser.error(f"--samples {options.samples} is no multiple of {_BATCH}")
    wanted = options.rows.split(",") if options.rows else [row.name for row in ROWS]
    unknown = set(wanted) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    source = resolve_model(options.model)
    task = infer_task(source.config)
    seq_len = choose_seq_len(source.config, task, options.seq_len)
    workload = Workload(source.name, source.config, task, seq_len, dtype=options.dtype)
    device = find_device(options.device)
    documents: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs, TrialServer(device, workload, Path(logs)) as runner:
        facts = runner.inspect()
        free = device.memory_free_bytes or device.memory_total_bytes
        cap = free - facts.context_bytes
        print(f"{options.model}, {seq_len} tokens, {options.samples} samples on {device.name}", file=sys.stderr)
        print(f"{format_bytes(cap)} to reserve; torch {facts.software.packages['torch']}", file=sys.stderr)
        for row in (row for row in ROWS if row.name in wanted):
            documents.append(_run(runner, row, device, cap, options.samples, Path(logs)))
            print(" ".join(_cells(documents[-1])), file=sys.stderr, flush=True)
    packages = {package: version_of(package) for package in ("bitsandbytes", "torchao")}
    record = {
        "command": ["python", "studies/guide.py", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.document(),
        "environment": {k: v for k, v in encode(facts.software).items() if k != "training_arguments_fields"},
        "optional_packages": packages,
        "workload": {k: v for k, v in dataclasses.asdict(workload).items() if k != "config"},
        "samples": options.samples,
        "rows": documents,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(documents))


def _run(runner: TrialServer, row: Row, device: Device, cap: int, samples: int, logs: Path) -> dict[str, Any]:
    why = _lacking(row, device)
    if why is not None:
        return {"row": row.name, **row.candidate.parameters(), "state": "not run", "message": why}
    name = uuid.uuid4().hex
    effort = whole_run(samples)
    job = TrialJob(name, row.candidate, cap, effort, _SEED, _TIMEOUT_SECONDS, str(logs / f"{row.name}.log"))
    return _document(row, run_trial(runner, job), samples)


if __name__ == "__main__":
    main()
