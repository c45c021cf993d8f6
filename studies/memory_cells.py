"""Compare predicted with measured peak memory, cell by cell: precision, checkpointing, batch and accumulation.

    python studies/memory_cells.py measure FOLDER [--seconds 300] [--models N] [--no-traces]
    python studies/memory_cells.py compare FILE.jsonl [--models NAME …] [--json]

``measure`` needs a GPU. Each cell is a trial in a process of its own that runs every micro-step. The first cells of all
models come first, so that it may be cut off at any time. It writes ``FOLDER/cells.jsonl`` as it goes, and for a few
cells ``FOLDER/trace-*.json.gz``: what the caching allocator was asked for, in order. ``compare`` needs no GPU: it
predicts the cells that were measured and prints the errors. What an H200 said is in
``studies/landscapes/memory_cells_h200.jsonl``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Bounds
from autotune.core.errors import AutotuneError
from autotune.core.jobs import Job, TrialWork
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, Effort, outcome_document
from autotune.core.placement import Placement
from autotune.core.schema import encode
from autotune.core.scratch import make_scratch
from autotune.core.units import GIB
from autotune.core.workload import Task, Workload
from autotune.devices import Device, device_used_bytes, find_device
from autotune.execution import TrialJob, TrialServer, run_trial
from autotune.execution.process_environment import server_environment
from autotune.models.resolve import resolve_model
from autotune.models.tasks import choose_seq_len, infer_task

# All micro-steps are run, and two steps before the measured one: reserved memory no longer grows then.
_EFFORT = Effort(warmup_steps=2, min_steps=1, max_steps=1, max_micro_steps=1024)
_ROOM_BYTES = 4 * GIB
"""Left free of the whole device, so that no cell meets the cap."""

_BF16, _BF16_CHECKPOINTED = Arm("bf16"), Arm("bf16", True)
_TF32, _TF32_CHECKPOINTED = Arm("tf32"), Arm("tf32", True)


@dataclass(frozen=True)
class Subject:
    """A model with its cells: the most informative first."""

    model: str
    task: Task | None
    seq_len: int | None
    cells: tuple[Candidate, ...]

    def workload(self) -> Workload:
        """The model with random weights and synthetic data."""
        source = resolve_model(self.model)
        task = self.task or infer_task(source.config)
        return Workload(source.name, source.config, task, choose_seq_len(source.config, task, self.seq_len))


def _cells(unit: int, *first: Candidate) -> tuple[Candidate, ...]:
    """Cells around a batch that suits the model; ``first`` go before."""
    usual = (
        Candidate(_BF16_CHECKPOINTED, 2 * unit, 8),
        Candidate(_TF32, unit, 4),
        Candidate(_TF32_CHECKPOINTED, 2 * unit, 2),
        Candidate(_BF16, unit, 16),
        Candidate(_BF16_CHECKPOINTED, 4 * unit, 1),
        Candidate(_TF32_CHECKPOINTED, unit, 32),
        Candidate(_BF16, 2 * unit, 1),
        Candidate(_TF32_CHECKPOINTED, 4 * unit, 1),
    )
    return tuple(dict.fromkeys((*first, *usual)))


def _eager(cells: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The same cells, for a model that has no other attention."""
    return tuple(replace(cell, arm=replace(cell.arm, attn_implementation="eager")) for cell in cells)


_SUBJECTS = (
    Subject("gpt2-medium", None, 1024, _cells(4, Candidate(_TF32_CHECKPOINTED, 16, 1))),
    Subject("roberta-base", "masked-lm", 512, _cells(8, Candidate(_TF32_CHECKPOINTED, 8, 1))),
    Subject("t5-base", None, 512, _cells(8, Candidate(_TF32_CHECKPOINTED, 16, 1))),
    Subject("google/vit-large-patch16-224", None, None, _cells(8, Candidate(_BF16, 8, 32))),
    Subject("openai/whisper-small", None, None, _cells(4, Candidate(_BF16, 8, 8))),
    Subject("bert-large-uncased", None, 512, _cells(8)),
    Subject("Qwen/Qwen2.5-0.5B", None, 512, _cells(4)),
    Subject("distilbert-base-uncased", None, 512, _cells(16)),
    Subject("facebook/bart-base", None, 512, _cells(8)),
    Subject("microsoft/deberta-v3-base", None, 512, _eager(_cells(4))),
    Subject("answerdotai/ModernBERT-base", None, 512, _cells(8)),
    Subject("facebook/dinov2-base", None, None, _cells(16)),
    Subject("EleutherAI/pythia-410m", None, 512, _cells(8)),
    Subject("meta-llama/Llama-3.2-1B", None, 512, _cells(4)),
    Subject("google/gemma-3-1b-pt", None, 512, _cells(2)),
    Subject("google/electra-base-discriminator", None, 512, _cells(8)),
)

# Cells whose reserved bytes were predicted 3 to 8 % wrong, though their allocated bytes were right.
_TRACED = (
    ("t5-base", Candidate(_TF32_CHECKPOINTED, 16, 1)),
    ("google/gemma-3-1b-pt", Candidate(_TF32_CHECKPOINTED, 4, 2)),
    ("meta-llama/Llama-3.2-1B", Candidate(_TF32, 4, 4)),
    ("facebook/dinov2-base", Candidate(_BF16_CHECKPOINTED, 32, 8)),
    ("distilbert-base-uncased", Candidate(_TF32, 16, 4)),
)


def _schedule(subjects: tuple[Subject, ...]) -> Iterator[tuple[Subject, Candidate]]:
    """Yield the first cell of every subject, then the second of every one, and so on."""
    for position in range(max(len(subject.cells) for subject in subjects)):
        for subject in subjects:
            if position < len(subject.cells):
                yield subject, subject.cells[position]


def _measure(runner: TrialServer, device: Device, candidate: Candidate, cap_bytes: int) -> dict[str, Any]:
    """Run one cell and say what it needed, and what the device had in use before it."""
    before_bytes = device_used_bytes(device.uuid)
    started = time.monotonic()
    job = TrialJob(uuid.uuid4().hex, candidate, cap_bytes, _EFFORT, 42, 120.0, "/dev/null")
    outcome = run_trial(runner, job)
    cell = {**candidate.parameters(), "state": outcome.state, "device_used_before_bytes": before_bytes}
    cell["wall_seconds"] = round(time.monotonic() - started, 2)
    if not isinstance(outcome, Completed):
        return {**cell, "message": outcome.message}
    measured = outcome_document(outcome)["measurement"]
    names = ["peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "allocation_retries"]
    names += ["micro_steps_run", "peak_reserved_first_step_bytes", "micro_batch_bytes", "step_seconds"]
    cell |= {name: measured[name] for name in names if name in measured}
    if before_bytes is not None and cell["device_used_bytes"] is not None:
        cell["used_beyond_reserved_bytes"] = cell["device_used_bytes"] - before_bytes - cell["peak_reserved_bytes"]
    return cell


def _packages() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "accelerate")}


def measure(folder: Path, seconds: float, models: int, *, traces: bool) -> None:
    """Run cells until the time is up; with ``models`` 0 the traces alone."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    device = find_device(None)
    if device.kind != "cuda":
        raise SystemExit("no GPU here: measure needs one")
    cap_bytes = (device.memory_free_bytes or device.memory_total_bytes) - _ROOM_BYTES
    subjects = _SUBJECTS[:models]
    with ExitStack() as stack, open(folder / "cells.jsonl", "a", encoding="utf-8") as out:

        def write(document: dict[str, Any]) -> None:
            print(json.dumps(document), file=out, flush=True)
            print(json.dumps(document), flush=True)

        write({"meta": True, "device": device.document(), "packages": _packages(), "cap_bytes": cap_bytes})
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not subjects:
            _trace_cells(folder, device, cap_bytes, deadline, write)
            return
        # Servers start in the background: all of them import while the traces and the first cells run.
        runners = {
            subject: stack.enter_context(TrialServer(device, subject.workload(), logs / str(number)))
            for number, subject in enumerate(subjects)
        }
        facts = runners[subjects[0]].inspect()
        write({"context_bytes": facts.context_bytes, "chip": encode(facts.chip)})
        schedule = _schedule(subjects)
        for number, (subject, candidate) in enumerate(schedule):
            if number == len(subjects) and traces:
                _trace_cells(folder, device, cap_bytes, deadline, write)
            if time.monotonic() > deadline:
                break
            try:
                cell = _measure(runners[subject], device, candidate, cap_bytes)
            except AutotuneError as error:
                cell = {**candidate.parameters(), "state": "lost", "message": str(error)}
            write({"model": subject.model, "task": subject.task, "seq_len": subject.seq_len, **cell})


# What the allocator was asked for


def _trace_cells(folder: Path, device: Device, cap_bytes: int, deadline: float, write: Any) -> None:
    """Run the cells that are worth a look again, each in a process that takes down what the allocator does."""
    environment = {**server_environment(Placement.of(device), os.environ, offline=True, own_code=False)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    for name, candidate in _TRACED:
        subject = next(subject for subject in _SUBJECTS if subject.model == name)
        arm = candidate.arm
        words = (arm.precision, "checkpointed" if arm.gradient_checkpointing else "plain")
        shape = f"{candidate.per_device_train_batch_size}x{candidate.gradient_accumulation_steps}"
        path = folder / f"trace-{name.split('/')[-1]}-{'-'.join(words)}-{shape}.json.gz"
        if time.monotonic() > deadline - 20:
            return
        work = TrialWork(candidate, Placement.of(device).rank_devices, cap_bytes, _EFFORT, 42)
        job = Job(path.name, subject.workload(), work, 90.0, os.devnull)
        command = [sys.executable, __file__, "trace", str(path)]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(job.document()),
                env=environment,
                timeout=90,
                text=True,
                capture_output=True,
                check=False,
            )
            said = "" if done.returncode == 0 else done.stderr[-500:]
        except subprocess.TimeoutExpired:
            said = "timed out"
        write({"trace": path.name, "bytes": path.stat().st_size if path.exists() else None, "error": said})


_PEAKS = ("allocated", "reserved")
_ACTIONS = {"alloc": 0, "free_completed": 1, "segment_alloc": 2, "segment_free": 3}
_FRAMES = 8


def trace(path: Path) -> None:
    """Run one trial of a job given on standard input and write what the allocator did in it."""
    import torch

    from autotune.worker.trial.run import Trial

    steps: list[int] = []

    def note(progress: Progress) -> None:
        if progress.step is not None:
            steps.append(time.time_ns() // 1000)

    document = json.loads(sys.stdin.read())
    job, scratch = Job.from_document(document), make_scratch("autotune-cells-")
    assert isinstance(job.work, TrialWork)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=600_000)
    outcome = outcome_document(Trial(job.workload, job.work, scratch, note).run())
    scratch.remove()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    places: dict[str, int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    events = []
    for entry in entries:
        code = _ACTIONS.get(entry["action"])
        if code is None:
            continue
        frames = [f for f in entry.get("frames", ()) if f["filename"] != "??"][:_FRAMES]
        names = [f"{'/'.join(f['filename'].split('/')[-2:])}:{f['line']}:{f['name']}" for f in frames]
        stack = tuple(places.setdefault(name, len(places)) for name in names)
        stream = entry.get("stream", 0)
        passed = entry.get("time_us", 0)
        events.append([code, entry["addr"], entry["size"], stacks.setdefault(stack, len(stacks)), passed, stream])
    told = {name: value for name, value in document.items() if name != "workload"}
    document = {"job": told, "outcome": outcome, "step_ends_us": steps}
    document |= {"actions": _ACTIONS, "places": list(places), "stacks": [list(s) for s in stacks], "events": events}
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as out:
        json.dump(document, out, default=str)


# Prediction against measurement


def _rows(path: Path, models: list[str]) -> Iterator[dict[str, Any]]:
    """Every measured cell of these models, or of all, beside its prediction.

    Fake training patches torch for good, so that this belongs in a process of its own.
    """
    from autotune.devices.gpus import CHIPS
    from autotune.worker.fake.predict import Limits
    from autotune.worker.fake.step import FakeTraining

    cells = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    measured = [
        cell for cell in cells if cell.get("state") == "completed" and cell["model"] in (models or cell["model"])
    ]
    limits: dict[tuple[str, Arm], Limits] = {}
    for cell in sorted(measured, key=lambda cell: str(cell["model"])):
        candidate = Candidate.from_parameters(cell)
        subject = next(subject for subject in _SUBJECTS if subject.model == cell["model"])
        if (subject.model, candidate.arm) not in limits:
            step = FakeTraining(subject.workload(), candidate.arm, CHIPS["h200"]).step()
            limits[subject.model, candidate.arm] = Limits(step, CHIPS["h200"], Bounds(2**60, 2**60))
        batch, accumulation = candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
        predicted = limits[subject.model, candidate.arm].prediction(batch, accumulation)
        for name in ("allocated", "reserved"):
            peak_bytes = getattr(predicted, f"peak_{name}_bytes")
            cell[f"predicted_{name}_bytes"] = peak_bytes
            cell[f"{name}_error"] = peak_bytes / cell[f"peak_{name}_bytes"] - 1
        yield {**cell, "cell": candidate.describe()}


def compare(path: Path, models: list[str], *, as_json: bool) -> None:
    """Print each measured cell with the error of what is predicted for it, and how many are near."""
    rows = []
    for row in _rows(path, models):
        rows.append(row)
        sizes = [f"{row[f'{name}_error']:+7.2%} of {row[f'peak_{name}_bytes'] >> 20:6}" for name in _PEAKS]
        line = f"{row['model']:34} {row['cell']:28} {sizes[0]} MiB allocated {sizes[1]} MiB reserved"
        print(json.dumps(row) if as_json else line, flush=True)
    if as_json:
        return
    for name in _PEAKS:
        errors = [abs(row[f"{name}_error"]) for row in rows]
        near = sum(error <= 0.03 for error in errors)
        print(f"{name}: worst {max(errors):.2%}, within 3 %: {near} of {len(errors)}")


def main() -> None:
    """Measure on a GPU, or compare what was measured with predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--seconds", type=float, default=300.0)
    measuring.add_argument("--models", type=int, default=len(_SUBJECTS))
    measuring.add_argument("--no-traces", action="store_true")
    commands.add_parser("trace").add_argument("path", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("path", type=Path)
    comparing.add_argument("--models", nargs="*", default=[])
    comparing.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.folder, options.seconds, options.models, traces=not options.no_traces)
    elif options.command == "trace":
        trace(options.path)
    else:
        compare(options.path, options.models, as_json=options.json)


if __name__ == "__main__":
    main()
