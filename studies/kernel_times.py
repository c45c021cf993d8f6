"""Record how long the kernels of training steps take on a GPU, by class of operation, and compare with predictions.

    python studies/kernel_times.py record FILE.jsonl [--seconds 300] [--device cuda:0] [--only MODEL …]
    python studies/kernel_times.py trace
    python studies/kernel_times.py compare FILE.jsonl[.gz]
    python studies/kernel_times.py fit FILE.jsonl[.gz]

``record`` needs a GPU. It runs the steps that a stock ``Trainer`` runs (autocast, clipping, the fused AdamW) under
CUPTI, through ``torch.profiler``. With CUDA activity alone it takes down the time of each kernel by name, for three
parts of a step: a micro-step whose gradients are the first, one that adds to them, and the update. For some cells it
then takes down the device time of each operation of a micro-step by name and input shapes, with CPU activity as well.
The most informative cells of all models come first, so that it may end at any time: nothing is begun after
``--seconds``. Each line is a cell, and is written at once. On a CPU (``--device cpu``) operations have CPU times, which
tells whether the program runs.

``trace`` records what the steps of all cells consist of, so that ``compare`` need not trace them. ``compare`` prints
predicted and measured GPU time for each cell, and errors by part, by precision and by whether the model's family took
part in the fit. ``fit`` prints the constants of ``autotune/estimate/gpu_time.py``, fitted to the families whose GPU
times other recordings have as well: to their micro-steps here, as a whole and by class, and to those other recordings.
No other family takes part. ``fit`` needs scipy, and none of the three a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import gzip
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recorded_steps import Subject
from step_times import (
    H200,
    MOST_OF_A_FAMILY,
    RELATIVE_ERROR,
    ROUND_NUMBERS,
    error_line,
    fitted,
    known_steps,
    operations_of,
    trace,
)
from step_times import cells as fitted_cells

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.kernel_kinds import kind_of_kernel, merge_kinds
from autotune.estimate.gpu_time import EFFICIENCIES, Efficiencies, GpuModel, GpuTime, gpu_time

_NS = 1e-9
_WARM_UP_STEPS = 2

SUBJECTS: tuple[tuple[Subject, int], ...] = (
    (Subject("bert-base-uncased", 128), 32),
    (Subject("meta-llama/Llama-3.2-1B", 512), 4),
    (Subject("gpt2", 1024), 8),
    (Subject("answerdotai/ModernBERT-base", 512), 16),
    (Subject("google/vit-large-patch16-224"), 32),
    (Subject("EleutherAI/pythia-410m", 512), 8),
    (Subject("Qwen/Qwen2.5-0.5B", 512), 8),
    (Subject("microsoft/deberta-v3-base", 512), 8),
    (Subject("roberta-base", 512, "masked-lm"), 16),
    (Subject("google/gemma-3-1b-pt", 512), 4),
    (Subject("t5-base", 256), 16),
    (Subject("albert-base-v2", 512), 16),
    (Subject("bert-large-uncased", 512), 16),
    (Subject("HuggingFaceTB/SmolLM2-360M", 512), 8),
    (Subject("gpt2-medium", 1024), 4),
    (Subject("facebook/bart-base", 512), 16),
    (Subject("distilbert-base-uncased", 128), 32),
    (Subject("openai/whisper-small"), 8),
    (Subject("facebook/dinov2-base"), 32),
    (Subject("google/electra-base-discriminator", 512), 16),
)
"""Models with a batch that suits them. Models whose GPU times took part in the fit take turns with others."""

_ROUNDS: tuple[tuple[Arm, float, bool], ...] = (
    (Arm("bf16"), 1, False),
    (Arm("tf32"), 1, False),
    (Arm("fp32"), 1, False),
    (Arm("bf16", True), 2, False),
    (Arm("bf16"), 4, False),
    (Arm("bf16"), 1, True),
    (Arm("tf32", True), 2, False),
    (Arm("bf16"), 0.25, False),
    (Arm("fp32", True), 0.5, False),
    (Arm("tf32"), 0.25, False),
    (Arm("bf16", attn_implementation="eager"), 1, False),
    (Arm("tf32"), 1, True),
)
"""Arms, factors of the batch, and whether operations are recorded; the most informative ones come first."""


@dataclass(frozen=True)
class Cell:
    """One model, arm and batch."""

    subject: Subject
    arm: Arm
    batch: int
    by_operation: bool = False
    """Whether operations are recorded as well, which takes several times as long."""


def cells(only: Sequence[str]) -> list[Cell]:
    """Return all cells, the most informative ones of every model first."""
    chosen = [(s, unit) for s, unit in SUBJECTS if not only or any(name in s.model for name in only)]
    return [
        Cell(subject, arm, max(1, int(unit * factor)), by_operation)
        for arm, factor, by_operation in _ROUNDS
        for subject, unit in chosen
    ]


# Recording


class Training:
    """A model on a device with its optimizer, and the parts of its steps in any precision."""

    def __init__(self, subject: Subject, attn_implementation: str, device: Any) -> None:
        import torch

        from autotune.worker.trial.build import build_model

        self._torch, self._device = torch, device
        torch.manual_seed(42)
        self._workload = subject.workload()
        self._model = build_model(self._workload, attn_implementation, device)
        self._model.config.use_cache = False
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-6, fused=True)
        self._inputs: dict[str, Any] = {}
        self._precision, self._checkpoints = "fp32", False

    def prepare(self, arm: Arm, batch: int) -> None:
        """Set what the following steps run."""
        from autotune.worker.trial.synthetic import synthetic_dataset

        self._precision = arm.precision
        # Convolutions of stock float32 training use TF32, as torch has them by default.
        self._torch.backends.cuda.matmul.allow_tf32 = arm.precision == "tf32"
        if arm.gradient_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        elif self._checkpoints:
            self._model.gradient_checkpointing_disable()
        self._checkpoints = arm.gradient_checkpointing
        samples = [synthetic_dataset(self._workload, self._model, 1, seed)[0] for seed in range(min(batch, 8))]
        rows = [samples[i % len(samples)] for i in range(batch)]
        self._inputs = {name: self._torch.stack([row[name] for row in rows]).to(self._device) for name in rows[0]}

    def micro_step(self) -> None:
        """Run a forward and a backward pass."""
        enabled = self._precision in ("bf16", "fp16")
        dtype = self._torch.float16 if self._precision == "fp16" else self._torch.bfloat16
        with self._torch.autocast(self._device.type, dtype, enabled=enabled):
            loss = self._model(**self._inputs)["loss"] / 2
        loss.backward()

    def update(self) -> None:
        """Clip the gradients and step the optimizer."""
        self._torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()

    def begin(self) -> None:
        """Begin a step."""
        self._optimizer.zero_grad(set_to_none=True)

    def end(self) -> None:
        """Free what only the steps of one cell need."""
        self.begin()
        self._inputs = {}

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return what is profiled, in order."""
        return {"first_micro_step": self.micro_step, "further_micro_step": self.micro_step, "update": self.update}


class Trainings:
    """Keeps models on the device: all of them together take half of an H200's memory, and a build takes seconds."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._kept: dict[tuple[Subject, str], Training] = {}

    def of(self, cell: Cell) -> Training:
        """Return the training of a cell's model; attention is eager where the model has no other."""
        key = cell.subject, attention_of(cell)
        if key not in self._kept:
            if self._device.type != "cuda":
                self._kept.clear()
            self._kept[key] = Training(*key, self._device)
        return self._kept[key]

    def forget(self, subject: Subject) -> None:
        """Free the memory of a model."""
        self._kept = {key: training for key, training in self._kept.items() if key[0] != subject}
        self._free()

    def free(self) -> None:
        """Free the memory of all models."""
        self._kept.clear()
        self._free()

    def _free(self) -> None:
        import torch

        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def attention_of(cell: Cell) -> str:
    """Return the attention that a cell is run with."""
    return cell.arm.attn_implementation if cell.arm.attn_implementation in _attentions(cell.subject) else "eager"


@functools.cache
def _attentions(subject: Subject) -> tuple[str, ...]:
    from autotune.worker.private.transformers import attention_implementations
    from autotune.worker.trial.build import model_class

    return tuple(attention_implementations(model_class(subject.workload())))


def record(path: Path, seconds: float, device_name: str, only: Sequence[str]) -> None:
    """Record one cell after the other until the time is over."""
    import torch

    # Imports take seconds, which are none of the cells'.
    import autotune.worker.trial.build
    import autotune.worker.trial.synthetic  # noqa: F401

    device = torch.device(device_name)
    trainings = Trainings(device)
    begun: set[Cell] = set()
    began = time.monotonic()
    with open(path, "a", encoding="utf-8") as file:
        _write(file, _meta(device))
        for cell in cells(only):
            if time.monotonic() - began > seconds:
                break
            started = time.monotonic()
            found = _recorded(cell, trainings, device, begun)
            if found is None:
                continue
            found["wall_seconds"] = round(time.monotonic() - started, 2)
            _write(file, found)
            told = found.get("error") or f"{sum(found['gpu_seconds'].values()) * 1000:.1f} ms"
            after = f"{found['wall_seconds']:.1f} s, {time.monotonic() - began:.0f} s in all"
            print(
                f"{cell.subject.model} {cell.arm.describe()} {cell.batch}: {told} ({after})",
                file=sys.stderr,
                flush=True,
            )


def _recorded(cell: Cell, trainings: Trainings, device: Any, begun: set[Cell]) -> Document | None:
    """Return the line of a cell; ``None`` where the same was run. A failure is recorded, and the other cells go on."""
    import torch

    found: Document = {**asdict(cell.subject), "batch": cell.batch, "arm": asdict(cell.arm)}
    try:
        as_run = replace(cell, arm=_arm_run(cell))
        if as_run in begun:
            return None
        begun.add(as_run)
        found["arm"] = asdict(as_run.arm)
        try:
            return found | _measure(cell, trainings.of(cell), device)
        except torch.OutOfMemoryError:
            pass
        # The other models may take the memory. Outside of the handler, where the failed step is no longer referenced.
        trainings.free()
        return found | _measure(cell, trainings.of(cell), device)
    except Exception as error:
        # What it left on the device would stay until its model's next cell.
        trainings.forget(cell.subject)
        return found | {"error": f"{type(error).__name__}: {error}"[:300]}


def _write(file: Any, document: Document) -> None:
    file.write(json.dumps(document) + "\n")
    file.flush()


def _meta(device: Any) -> Document:
    import torch

    packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    meta: Document = {"meta": True, "command": sys.argv, "date": datetime.now(UTC).isoformat(), "packages": packages}
    if device.type == "cuda":
        from autotune.devices.listing import find_device

        facts = torch.cuda.get_device_properties(device)
        meta |= {"device": facts.name, "multiprocessors": facts.multi_processor_count, "cuda": torch.version.cuda}
        # Without NVML the version of the driver stays unknown.
        with contextlib.suppress(Exception):
            meta["driver"] = find_device(str(device)).driver
    else:
        meta["device"] = "cpu"
    return meta


def _measure(cell: Cell, training: Training, device: Any) -> Document:
    training.prepare(cell.arm, cell.batch)
    for _ in range(_WARM_UP_STEPS):
        training.begin()
        for part in training.parts().values():
            part()
    training.begin()
    kernels, seconds = {}, {}
    for name, part in training.parts().items():
        found = _kernels(part, device)
        kernels[name] = found
        seconds[name] = sum(ns for _, ns in found.values()) * _NS
    if not any(seconds.values()):
        raise RuntimeError("the profiler recorded nothing")
    document: Document = {"gpu_seconds": seconds, "kernels": {name: _listed(found) for name, found in kernels.items()}}
    if cell.by_operation:
        training.begin()
        document["operations"] = {"first_micro_step": _operations(training.micro_step, device)}
    training.end()
    return document


@contextlib.contextmanager
def _profile(device: Any, *, by_operation: bool) -> Iterator[Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    if by_operation and on_gpu:
        activities.append(ProfilerActivity.CPU)
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=activities, record_shapes=by_operation) as profiled:
        yield profiled
        if on_gpu:
            torch.cuda.synchronize(device)


def _kernels(part: Callable[[], None], device: Any) -> dict[str, tuple[int, int]]:
    """Return how often each kernel ran, and for how many nanoseconds in all."""
    with _profile(device, by_operation=False) as profiled:
        part()
    wanted = "CUDA" if device.type == "cuda" else "CPU"
    found: dict[str, tuple[int, int]] = {}
    # The public events are a tree of Python objects that takes many times as long to build.
    for event in profiled.profiler.kineto_results.events():
        if event.device_type().name == wanted and not event.is_user_annotation():
            count, ns = found.get(event.name(), (0, 0))
            found[event.name()] = count + 1, ns + event.duration_ns()
    return found


def _listed(found: dict[str, tuple[int, int]]) -> list[list[Any]]:
    """Return ``[class, name, count, nanoseconds]``, the longest first."""
    rows = sorted(found.items(), key=lambda item: -item[1][1])
    return [[kind_of_kernel(name), name[:160], count, ns] for name, (count, ns) in rows]


def _operations(part: Callable[[], None], device: Any) -> list[list[Any]]:
    """Return ``[operation, input shapes, count, microseconds on the device]`` of all that took any time."""
    with _profile(device, by_operation=True) as profiled:
        part()
    rows = []
    for row in profiled.key_averages(group_by_input_shape=True):
        on_device = row.self_device_time_total if device.type == "cuda" else row.self_cpu_time_total
        if on_device > 0 and row.key.startswith("aten::"):
            rows.append([row.key, str(row.input_shapes)[:200], row.count, on_device])
    return sorted(rows, key=lambda row: -row[3])


# Comparing


def trace_all() -> None:
    """Record what the steps of all cells consist of."""
    trace([(cell.subject, _arm_run(cell)) for cell in cells(())])


def _arm_run(cell: Cell) -> Arm:
    return replace(cell.arm, attn_implementation=attention_of(cell))


def compare(path: Path) -> None:
    """Print predicted and measured GPU times."""
    rows = _rows(path)
    measured = measured_cells(path)
    families = fitted_families()
    errors: dict[str, list[float]] = {}
    kinds: dict[str, list[tuple[float, float]]] = {}
    for row in measured:
        subject, arm = Subject(row["model"], row["seq_len"], row["task"]), Arm(**row["arm"])
        predicted = predicted_for(row, EFFICIENCIES)
        _add_kinds(kinds, predicted, row)
        known = "fitted" if subject.family in families else "held out"
        for part, (ours, theirs) in parts(predicted, row).items():
            if theirs > 0:
                groups = (part, f"{part}, {arm.precision}", f"{part}, {known}", f"{part}, {known}, {arm.precision}")
                for group in groups[: 4 if part == _MICRO_STEP else 1]:
                    errors.setdefault(group, []).append(ours / theirs - 1)
        ours, theirs = parts(predicted, row)[_MICRO_STEP]
        candidate = Candidate(arm, row["batch"]).describe()
        told = f"{theirs * 1000:>9.2f} ms{ours * 1000:>9.2f} ms{ours / theirs - 1:>+8.1%}"
        print(f"{subject.model:<36}{candidate:<38}{told}  {known}")
    failed = [row for row in rows if "error" in row]
    models = {row["model"] for row in measured}
    print(f"{len(measured)} cells of {len(models)} models; {len(failed)} failed")
    for row in failed:
        print(f"  {row['model']} {Arm(**row['arm']).describe()} {row['batch']}: {row['error'][:120]}")
    print(f"{'relative error':<58}   n   median  90 of 100  most    bias")
    for name, values in sorted(errors.items()):
        print(error_line(name, values))
    print(f"{'class':<28}{'cells':>6}{'predicted / measured (median)':>32}{'share of measured time':>25}")
    everything = sum(theirs for found in kinds.values() for _, theirs in found)
    for kind, found in sorted(kinds.items()):
        ratios = [ours / theirs for ours, theirs in found if theirs > 0]
        if ratios:
            share = sum(theirs for _, theirs in found) / everything
            print(f"{kind:<28}{len(ratios):>6}{statistics.median(ratios):>32.2f}{share:>25.1%}")


def _key(row: Document) -> tuple[Any, ...]:
    return row["model"], row["seq_len"], row["task"], row["batch"], Arm(**row["arm"])


_MICRO_STEP = "micro-step"


@functools.cache
def fitted_families() -> set[str]:
    """Return the families that take part in the fit: those whose GPU times other recordings have as well."""
    by_gpu_time, _ = fitted_cells(known_steps())
    return {cell.subject.family for cell in by_gpu_time}


def _rows(path: Path) -> list[Document]:
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return [json.loads(line) for line in text.splitlines()]


def measured_cells(path: Path) -> list[Document]:
    """Return each recorded cell once: the first of those that were recorded again, with their operations."""
    return list({_key(row): row for row in reversed(_rows(path)) if "gpu_seconds" in row}.values())[::-1]


def predicted_for(row: Document, efficiencies: Efficiencies) -> GpuTime:
    """Return the predicted GPU time of a recorded cell."""
    assert H200.rates is not None
    arm = Arm(**row["arm"])
    operations = _operations_of(Subject(row["model"], row["seq_len"], row["task"]), arm)
    return gpu_time(operations, GpuModel(H200.rates, arm.precision, efficiencies), row["batch"], 1)


_operations_of = functools.cache(operations_of)


def fit(path: Path) -> None:
    """Print constants fitted to the families that take part."""
    families = fitted_families()
    by_gpu_time, by_step_time = fitted_cells(known_steps())
    others = [cell for cell in by_gpu_time + by_step_time if cell.subject.family in families]
    rows = [row for row in measured_cells(path) if Subject(row["model"], row["seq_len"]).family in families]
    counts = Counter(Subject(row["model"], row["seq_len"]).family for row in rows)

    def errors(efficiencies: Efficiencies) -> list[float]:
        found: list[float] = []
        for row in rows:
            most = MOST_OF_A_FAMILY / counts[Subject(row["model"], row["seq_len"]).family]
            weight = math.sqrt(min(1.0, most)) / RELATIVE_ERROR
            found += [weight * error for error in _errors(row, efficiencies)]
        return found

    for name, value in asdict(fitted(others, ROUND_NUMBERS, errors)).items():
        print(f"{name}: {value:.3g}")


# Kernels of several kinds of operations have one name: a copy casts, or changes the order of elements.
_FITTED_KINDS = (
    "matrix_product",
    "attention",
    "attention_backward",
    "elementwise",
    "cast",
    "normalisation",
    "normalisation_backward",
    "softmax",
    "reduction",
    "dropout",
)


def _errors(row: Document, efficiencies: Efficiencies) -> list[float]:
    """Return errors of a micro-step and of the update, and those of classes as shares of the micro-step."""
    predicted = predicted_for(row, efficiencies)
    pairs = parts(predicted, row)
    ours, theirs = merge_kinds(predicted.by_kind), merge_kinds(_measured_kinds(row, ("first_micro_step",)))
    whole = pairs[_MICRO_STEP][1]
    found = [math.log(one / other) for one, other in (pairs[_MICRO_STEP], pairs["update"])]
    return found + [(ours.get(kind, 0.0) - theirs.get(kind, 0.0)) / whole for kind in _FITTED_KINDS]


def parts(predicted: GpuTime, row: Document) -> dict[str, tuple[float, float]]:
    """Return predicted and measured seconds of the parts of a step."""
    seconds, micro_step = row["gpu_seconds"], predicted.forward + predicted.backward
    return {
        _MICRO_STEP: (micro_step, seconds["first_micro_step"]),
        "further micro-step": (micro_step + predicted.accumulation, seconds["further_micro_step"]),
        "update": (predicted.update, seconds["update"]),
    }


def _add_kinds(kinds: dict[str, list[tuple[float, float]]], predicted: GpuTime, row: Document) -> None:
    """Add what the classes of one micro-step and update took, as predicted and as measured."""
    ours, theirs = merge_kinds(predicted.by_kind), merge_kinds(_measured_kinds(row, ("first_micro_step", "update")))
    for kind in {**ours, **theirs}:
        kinds.setdefault(kind, []).append((ours.get(kind, 0.0), theirs.get(kind, 0.0)))


def _measured_kinds(row: Document, parts: Sequence[str]) -> dict[str, float]:
    """Return the seconds of each class; names are classed anew, since more are told apart than when recorded."""
    found: dict[str, float] = {}
    for part in parts:
        for _, name, _, ns in row["kernels"][part]:
            kind = kind_of_kernel(name)
            found[kind] = found.get(kind, 0.0) + ns * _NS
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--seconds", type=float, default=300.0)
    recording.add_argument("--device", default="cuda:0")
    recording.add_argument("--only", nargs="*", default=[])
    commands.add_parser("trace")
    for name in ("compare", "fit"):
        commands.add_parser(name).add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.file, given.seconds, given.device, given.only)
    elif given.command == "trace":
        trace_all()
    elif given.command == "compare":
        compare(given.file)
    else:
        fit(given.file)


if __name__ == "__main__":
    main()
