"""Record how long the kernels of training steps take on a GPU, by class of operation, and compare with predictions.

    python studies/kernel_times.py record FILE.jsonl [--seconds 440] [--device cuda:0] [--only MODEL …]
    python studies/kernel_times.py compare FILE.jsonl

``record`` needs a GPU. It runs the steps that a stock ``Trainer`` runs (autocast, clipping, the fused AdamW) under
CUPTI, through ``torch.profiler``. With CUDA activity alone it takes down the time of each kernel by name, for three
parts of a step: a micro-step whose gradients are the first, one that adds to them, and the update. Then, once for each
model and arm, with CPU activity as well, it takes down the device time of each operation by name and input shapes. The
most informative cells of all models come first, so that it may end at any time: nothing is begun after ``--seconds``.
Each line is a cell. On a CPU (``--device cpu``) operations have CPU times, which tells whether the program runs.

``compare`` needs no GPU. It prints predicted and measured GPU time for each cell, and by class over all.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recorded_steps import Subject
from step_times import H200, error_line, operations_of

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.kernel_kinds import kind_of_kernel
from autotune.estimate.gpu_time import GpuModel, GpuTime, gpu_time

_NS = 1e-9
_US = 1e-6
_WARM_UP_STEPS = 2
_TF32_ARM, _BF16_ARM, _FP32_ARM = Arm("tf32"), Arm("bf16"), Arm("fp32")

SUBJECTS: tuple[tuple[Subject, int], ...] = (
    (Subject("bert-base-uncased", 128), 32),
    (Subject("gpt2", 1024), 8),
    (Subject("roberta-base", 512, "masked-lm"), 16),
    (Subject("google/vit-large-patch16-224"), 32),
    (Subject("Qwen/Qwen2.5-0.5B", 512), 8),
    (Subject("t5-base", 256), 16),
    (Subject("bert-large-uncased", 512), 16),
    (Subject("facebook/dinov2-base"), 32),
    (Subject("EleutherAI/pythia-410m", 512), 8),
    (Subject("answerdotai/ModernBERT-base", 512), 16),
    (Subject("facebook/bart-base", 512), 16),
    (Subject("google/electra-base-discriminator", 512), 16),
    (Subject("openai/whisper-small"), 8),
    (Subject("meta-llama/Llama-3.2-1B", 512), 4),
    (Subject("microsoft/deberta-v3-base", 512), 8),
    (Subject("gpt2-medium", 1024), 4),
    (Subject("distilbert-base-uncased", 128), 32),
    (Subject("google/gemma-3-1b-pt", 512), 4),
)
"""Models with a batch that suits them; half of these families took part in no fit so far."""


@dataclass(frozen=True)
class Cell:
    """One model, arm and batch."""

    subject: Subject
    arm: Arm
    batch: int
    by_operation: bool = False
    """Whether operations are recorded as well, which takes several times as long."""


def cells(only: Sequence[str]) -> list[Cell]:
    """Return all cells, the most informative of every model first."""
    chosen = [(s, unit) for s, unit in SUBJECTS if not only or any(name in s.model for name in only)]
    rounds: list[list[Cell]] = []
    for arm, factor, by_operation in (
        (_BF16_ARM, 1, True),
        (_TF32_ARM, 1, True),
        (_FP32_ARM, 1, False),
        (Arm("bf16", True), 2, False),
        (_BF16_ARM, 4, False),
        (Arm("tf32", True), 2, False),
        (_BF16_ARM, 0.25, False),
        (_TF32_ARM, 4, False),
        (Arm("fp32", True), 2, False),
        (Arm("bf16", attn_implementation="eager"), 1, True),
    ):
        rounds.append([Cell(s, arm, max(1, int(unit * factor)), by_operation) for s, unit in chosen])
    return [cell for each in rounds for cell in each]


# Recording


class Steps:
    """The parts of a step of one model, on a device."""

    def __init__(self, cell: Cell, device: Any) -> None:
        import torch

        from autotune.worker.trial.build import build_model
        from autotune.worker.trial.synthetic import synthetic_dataset

        self._torch, self._device, self._arm = torch, device, cell.arm
        torch.manual_seed(42)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = cell.arm.precision == "tf32"
        workload = cell.subject.workload()
        self._model = build_model(workload, cell.arm.attn_implementation, device)
        self._model.config.use_cache = False
        if cell.arm.gradient_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-6, fused=True)
        samples = [synthetic_dataset(workload, self._model, 1, seed)[0] for seed in range(min(cell.batch, 8))]
        rows = [samples[i % len(samples)] for i in range(cell.batch)]
        self._inputs = {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}

    def micro_step(self) -> None:
        """Run a forward and a backward pass, and wait as the Trainer does for the loss."""
        precision = self._arm.precision
        enabled = precision in ("bf16", "fp16")
        dtype = self._torch.float16 if precision == "fp16" else self._torch.bfloat16
        with self._torch.autocast(self._device.type, dtype, enabled=enabled):
            loss = self._model(**self._inputs)["loss"] / 2
        loss.backward()

    def update(self) -> None:
        """Clip the gradients and step the optimizer."""
        self._torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()

    def forget_gradients(self) -> None:
        """Begin a step."""
        self._optimizer.zero_grad(set_to_none=True)

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return what is profiled, in order."""
        return {"first_micro_step": self.micro_step, "further_micro_step": self.micro_step, "update": self.update}


def record(path: Path, seconds: float, device_name: str, only: Sequence[str]) -> None:
    """Record one cell after the other until the time is over."""
    import torch

    device = torch.device(device_name)
    began = time.monotonic()
    with open(path, "a", encoding="utf-8") as file:
        _write(file, _meta(device))
        for cell in cells(only):
            if time.monotonic() - began > seconds:
                break
            started = time.monotonic()
            found: Document = {**asdict(cell.subject), "batch": cell.batch, "arm": asdict(cell.arm)}
            try:
                found |= _measure(cell, device)
            except Exception as error:
                # Out of memory, or an attention that a model does not have: the others go on.
                found["error"] = f"{type(error).__name__}: {error}"[:300]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            found["wall_seconds"] = round(time.monotonic() - started, 2)
            _write(file, found)
            told = found.get("error") or f"{sum(found['gpu_seconds'].values()) * 1000:.1f} ms"
            print(f"{cell.subject.model} {cell.arm.describe()} {cell.batch}: {told}", file=sys.stderr, flush=True)


def _write(file: Any, document: Document) -> None:
    file.write(json.dumps(document) + "\n")
    file.flush()


def _meta(device: Any) -> Document:
    import torch

    packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    meta: Document = {"meta": True, "command": sys.argv, "date": datetime.now(UTC).isoformat(), "packages": packages}
    if device.type == "cuda":
        from autotune.devices import find_device

        facts = torch.cuda.get_device_properties(device)
        meta |= {"device": facts.name, "multiprocessors": facts.multi_processor_count, "cuda": torch.version.cuda}
        meta["driver"] = find_device(str(device)).driver
    else:
        meta["device"] = "cpu"
    return meta


def _measure(cell: Cell, device: Any) -> Document:
    steps = Steps(cell, device)
    for _ in range(_WARM_UP_STEPS):
        steps.forget_gradients()
        for part in steps.parts().values():
            part()
    steps.forget_gradients()
    kernels, seconds = {}, {}
    for name, part in steps.parts().items():
        found = _kernels(part, device)
        kernels[name] = found
        seconds[name] = sum(ns for _, ns in found.values()) * _NS
    document: Document = {"gpu_seconds": seconds, "kernels": {name: _listed(found) for name, found in kernels.items()}}
    if cell.by_operation:
        steps.forget_gradients()
        document["operations"] = {name: _operations(part, device) for name, part in steps.parts().items()}
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


def compare(path: Path) -> None:
    """Print predicted and measured GPU times."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    measured = [row for row in rows if "gpu_seconds" in row]
    assert H200.rates is not None
    errors: dict[str, list[float]] = {}
    kinds: dict[str, list[tuple[float, float]]] = {}
    for row in measured:
        arm = Arm(**row["arm"])
        subject = Subject(row["model"], row["seq_len"], row["task"])
        operations = operations_of(subject, arm)
        predicted = gpu_time(operations, GpuModel(H200.rates, arm.precision), row["batch"], 1)
        seconds = row["gpu_seconds"]
        pairs = {
            "micro-step": (predicted.forward + predicted.backward, seconds["first_micro_step"]),
            "further micro-step": (
                predicted.forward + predicted.backward + predicted.accumulation,
                seconds["further_micro_step"],
            ),
            "update": (predicted.update, seconds["update"]),
        }
        for name, (ours, theirs) in pairs.items():
            if theirs > 0:
                errors.setdefault(name, []).append(ours / theirs - 1)
                errors.setdefault(f"{name}, {arm.precision}", []).append(ours / theirs - 1)
        _add_kinds(kinds, predicted, row)
        ours, theirs = pairs["micro-step"]
        candidate = Candidate(arm, row["batch"]).describe()
        told = f"{theirs * 1000:>9.2f} ms{ours * 1000:>9.2f} ms{ours / theirs - 1:>+8.1%}"
        print(f"{subject.model:<36}{candidate:<32}{told}")
    print(f"{'relative error':<58}   n   median  90 of 100  most    bias")
    for name, values in sorted(errors.items()):
        print(error_line(name, values))
    print(f"{'class':<28}{'cells':>6}{'predicted / measured (median)':>32}")
    for kind, found in sorted(kinds.items()):
        ratios = [ours / theirs for ours, theirs in found if theirs > 0]
        if ratios:
            print(f"{kind:<28}{len(ratios):>6}{statistics.median(ratios):>32.2f}")


def _add_kinds(kinds: dict[str, list[tuple[float, float]]], predicted: GpuTime, row: Document) -> None:
    """Add what the classes of one micro-step and update took, as predicted and as measured."""
    theirs: dict[str, float] = {}
    for part in ("first_micro_step", "update"):
        for kind, _, _, ns in row["kernels"][part]:
            theirs[kind] = theirs.get(kind, 0.0) + ns * _NS
    for kind, seconds in predicted.by_kind.items():
        kinds.setdefault(kind, []).append((seconds, theirs.get(kind, 0.0)))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--seconds", type=float, default=440.0)
    recording.add_argument("--device", default="cuda:0")
    recording.add_argument("--only", nargs="*", default=[])
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.file, given.seconds, given.device, given.only)
    else:
        compare(given.file)


if __name__ == "__main__":
    main()
