"""Record a landscape on this machine: every cell of a grid, or each arm up to where memory ends.

    python studies/record.py grid MODEL [--seq-len N] [--effective-batch 64] [--memory-limit 24GiB] > FILE.jsonl
    python studies/record.py boundary MODEL [--seq-len N] [--memory-limit 24GiB] > FILE.jsonl

One JSON object a line; the first is about the machine. Every cell is a trial process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from recorded_steps import Subject

from autotune.core.candidate import Candidate
from autotune.core.outcome import Completed, Effort, Failed, Outcome
from autotune.core.schema import encode
from autotune.core.units import MIB, parse_bytes
from autotune.devices.listing import find_device
from autotune.estimate.history import History, Tried
from autotune.execution import TrialJob, TrialServer, run_trial
from autotune.space.space import Space
from autotune.tuning.policy import MaxBatchPolicy
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import MAX_BATCH_EFFORT, SearchRequest

_TIMES = frozenset(
    {"trial_wall_seconds", "phase_seconds", "step_seconds", "optimizer_step_seconds", "first_step_seconds"}
    | {"samples_per_second", "step_seconds_each", "warmup_step_seconds", "relative_spread"}
)


def _request(options: argparse.Namespace) -> SearchRequest:
    return SearchRequest(
        workload=Subject(options.model, options.seq_len, options.task).workload(),
        device=find_device(options.device),
        effective_batch=options.effective_batch if options.kind == "grid" else None,
        precisions=tuple(options.precision.split(",")) if options.precision else None,
        memory_limit_bytes=parse_bytes(options.memory_limit),
        objective="throughput" if options.kind == "grid" else "max-batch",
    )


def _mib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else round(size_bytes / MIB)


def _cell(candidate: Candidate, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Return the recorded line of a trial that took so many seconds."""
    cell: dict[str, Any] = candidate.parameters()
    cell["trial_wall_seconds"] = round(seconds, 3)
    cell["phase_seconds"] = outcome.phase_seconds
    if isinstance(outcome, Failed):
        return {**cell, "state": "failed", "message": outcome.message}
    if not isinstance(outcome, Completed):
        peaks = _mib(outcome.peak_allocated_bytes), _mib(outcome.peak_reserved_bytes)
        return {**cell, "state": "oom", "peak_allocated_mib": peaks[0], "peak_reserved_mib": peaks[1]}
    measured = outcome.measurement
    return {
        **cell,
        "state": "ok",
        "step_seconds": round(measured.step_seconds, 5),
        "optimizer_step_seconds": round(measured.optimizer_seconds or 0.0, 5),
        "first_step_seconds": round(measured.warmup_step_seconds[0], 5),
        "samples_per_second": round(measured.samples_per_second, 5),
        "measured_steps": len(measured.step_seconds_each),
        "step_seconds_each": [round(seconds, 5) for seconds in measured.step_seconds_each],
        "warmup_step_seconds": [round(seconds, 5) for seconds in measured.warmup_step_seconds],
        "micro_steps_run": measured.micro_steps_run,
        "relative_spread": round(measured.relative_spread, 5),
        "peak_allocated_mib": _mib(measured.peak_allocated_bytes),
        "peak_reserved_mib": _mib(measured.peak_reserved_bytes),
        "alloc_retries": measured.allocation_retries,
    }


def _record(runner: TrialServer, prepared: Prepared, candidate: Candidate, effort: Effort) -> tuple[Outcome, float]:
    """Run a trial of a candidate; return its outcome and its seconds."""
    started = time.monotonic()
    job = TrialJob(uuid.uuid4().hex, candidate, prepared.ceiling.cap_bytes, effort, 42, 300.0, "/dev/null")
    outcome = run_trial(runner, job)
    return outcome, time.monotonic() - started


def _grid(runner: TrialServer, prepared: Prepared) -> Iterator[dict[str, Any]]:
    """Yield a trial of every arm at every batch."""
    space = prepared.space
    for arm in space.arms:
        for batch in space.batches.at_level(8):
            candidate = space.candidate(arm, batch)
            yield _cell(candidate, *_record(runner, prepared, candidate, Effort()))


def _boundary(runner: TrialServer, prepared: Prepared) -> Iterator[dict[str, Any]]:
    """Yield the trials of each arm up to its largest batch, and one of half that batch with accumulation."""
    for arm in prepared.space.arms:
        history = History(prepared.ceiling)
        policy = MaxBatchPolicy(Space((arm,), prepared.space.batches))
        while (candidate := policy.next(history)) is not None:
            outcome, seconds = _record(runner, prepared, candidate, MAX_BATCH_EFFORT)
            history.add(Tried(uuid.uuid4().hex, candidate, outcome))
            yield _cell(candidate, outcome, seconds)
        largest = history.largest()
        if largest is not None:
            batch = max(1, largest.candidate.per_device_train_batch_size // 2)
            accumulating = Candidate(arm, batch, 2)
            yield _cell(accumulating, *_record(runner, prepared, accumulating, MAX_BATCH_EFFORT))


def main() -> None:
    """Run the trials of a landscape, and print each as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("grid", "boundary"))
    parser.add_argument("model")
    parser.add_argument("--task")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--effective-batch", type=int, default=64)
    parser.add_argument("--memory-limit", default="24GiB")
    parser.add_argument("--precision")
    parser.add_argument("--device")
    parser.add_argument(
        "--memory-only",
        metavar="CONTEXT_BYTES",
        type=int,
        help="several recordings share the device: leave times out, and take the CUDA context's size from here",
    )
    options = parser.parse_args()
    request = _request(options)
    with tempfile.TemporaryDirectory() as logs, TrialServer(request.device, request.workload, Path(logs)) as runner:
        started = time.monotonic()
        facts = runner.inspect()
        if options.memory_only is not None:
            facts = replace(facts, context_bytes=options.memory_only)
        import_seconds = round(time.monotonic() - started, 2)
        prepared = prepare(request, facts)
        environment = {k: v for k, v in prepared.environment.items() if k != "training_arguments_fields"}
        workload = {k: v for k, v in request.workload.document().items() if k != "config"}
        meta = {"meta": True, "command": ["python", "studies/record.py", *sys.argv[1:]]}
        meta |= {"environment": environment, "workload": workload, "ceiling": encode(prepared.ceiling)}
        meta |= {"cap_bytes": prepared.ceiling.cap_bytes, "line_bytes": prepared.ceiling.line_bytes}
        meta |= {"model": encode(prepared.model), "cold_import_s": import_seconds}
        print(json.dumps(meta), flush=True)
        for cell in (_grid if options.kind == "grid" else _boundary)(runner, prepared):
            if options.memory_only is not None:
                cell = {name: value for name, value in cell.items() if name not in _TIMES}
            print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
