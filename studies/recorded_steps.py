"""Every step that was timed on an H200, from all recordings in one form, with the operations that it consists of."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.prediction import Operations
from autotune.core.schema import decode
from autotune.core.workload import Task, Workload
from autotune.models.resolve import resolve_model
from autotune.models.tasks import choose_seq_len, infer_task

ROOT = Path(__file__).resolve().parent.parent
LANDSCAPES = ROOT / "studies" / "landscapes"
RUNS = ROOT / "studies" / "runs"
OPERATIONS = LANDSCAPES / "operations.json.gz"
"""What ``studies/step_times.py trace`` recorded."""


@dataclass(frozen=True)
class Subject:
    """A training: a model, its task where that is not the usual one, and the length of a sample."""

    model: str
    seq_len: int | None = None
    task: Task | None = None

    def workload(self) -> Workload:
        """Return the workload with random weights and synthetic data."""
        source = resolve_model(self.model)
        task = self.task or infer_task(source.config)
        return Workload(source.name, source.config, task, choose_seq_len(source.config, task, self.seq_len))

    @property
    def family(self) -> str:
        """Return the family of the model: models with equal kinds of layers are held out of a fit together."""
        name = self.model.rpartition("/")[2].lower()
        return next((family for family in _FAMILIES if family in name), name)


_FAMILIES = ("distilbert", "roberta", "bert-base-uncased", "bert-large", "qwen", "vit", "gpt2")


@dataclass(frozen=True)
class Step:
    """A recorded optimizer step."""

    subject: Subject
    candidate: Candidate
    step_seconds: float
    gpu_seconds: float | None
    """While the GPU computed (CUPTI); ``None`` where that was not measured."""
    source: str
    """The file."""


_CASES = {
    "bert-base": Subject("bert-base-uncased", 128),
    "bert-base-loaders": Subject("bert-base-uncased", 128),
    "bert-base-cores": Subject("bert-base-uncased", 128),
    "bert-base-checkpointed": Subject("bert-base-uncased", 128),
    "roberta": Subject("roberta-base", 512),
    "vit": Subject("vit-base-patch16-224"),
    "distilbert": Subject("distilbert-base-uncased", 128),
    "qwen": Subject("Qwen/Qwen2.5-0.5B", 512),
    "roberta-mlm": Subject("roberta-base", 512, "masked-lm"),
    "bert-large": Subject("bert-large-uncased", 512),
    "vit-large": Subject("google/vit-large-patch16-224"),
    "gpt2-medium": Subject("gpt2-medium", 1024),
    "gpt2": Subject("gpt2", 1024),
    "t5-base": Subject("t5-base", 256),
    "qwen2.5-0.5b": Subject("Qwen/Qwen2.5-0.5B", 512),
}
_GRIDS = {
    "bert-large-uncased_h200_cap23.5GiB_effective64": _CASES["bert-large"],
    "bert-large-uncased_h200_cap23.5GiB_batches": _CASES["bert-large"],
    "gpt2-medium_h200_24GiB_effective64": _CASES["gpt2-medium"],
    "Qwen2.5-0.5B_h200_24GiB_effective64": _CASES["qwen"],
    "roberta-base_h200_24GiB_effective64": Subject("roberta-base", 512),
    "vit-large-patch16-224_h200_24GiB_effective64": _CASES["vit-large"],
}


def recorded_steps() -> list[Step]:
    """Return every recorded step of a trial that was neither compiled nor changed by Liger's kernels."""
    every = [*_busy(), *_grids(), *_memory_cells(), *_affinity(), *_promises(), *_searches()]
    return [s for s in every if not s.candidate.arm.torch_compile and not s.candidate.arm.use_liger_kernel]


def read_lines(path: Path) -> list[Document]:
    """Return the JSON objects of a file, one a line, which may be compressed."""
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return [json.loads(line) for line in text.splitlines()]


def _busy() -> Iterator[Step]:
    """Yield the steps whose GPU time was recorded with CUPTI alone."""
    path = LANDSCAPES / "gpu_busy_h200.jsonl"
    for row in read_lines(path)[1:]:
        if "qwen" in row["model"]:
            # The recording does not say how long the samples were, and they were not those of the other recordings.
            continue
        yield Step(
            _CASES[row["model"].replace("-uncased", "")],
            Candidate.from_parameters(row),
            row["wall_ms"] / 1000,
            row["gpu_busy_ms"] / 1000,
            path.stem,
        )


def _grids() -> Iterator[Step]:
    """Yield the steps of the recorded grids."""
    for stem, subject in _GRIDS.items():
        folder = LANDSCAPES if (LANDSCAPES / f"{stem}.jsonl").exists() else ROOT / "tests" / "landscapes"
        for row in read_lines(folder / f"{stem}.jsonl")[1:]:
            if "step_seconds" in row:
                yield Step(subject, Candidate.from_parameters(row), row["step_seconds"], None, stem)


def _memory_cells() -> Iterator[Step]:
    """Yield the timed steps of the recording of peaks."""
    path = LANDSCAPES / "memory_cells_h200.jsonl"
    for row in read_lines(path)[2:]:
        if row.get("step_seconds"):
            subject = Subject(row["model"], row["seq_len"], row["task"])
            yield Step(subject, Candidate.from_parameters(row), row["step_seconds"], None, path.stem)


def _affinity() -> Iterator[Step]:
    """Yield the steps that were recorded with and without pinning to a core."""
    path = RUNS / "h200_affinity.jsonl"
    for row in read_lines(path):
        if "step_seconds" not in row:
            continue
        busy = row["step_seconds"] * row["gpu_busy_share"] if row.get("gpu_busy_share") else None
        yield Step(
            _CASES[row["case"]], Candidate.from_parameters(row["candidate"]), row["step_seconds"], busy, path.stem
        )


def _promises() -> Iterator[Step]:
    """Yield the steps of searches whose promises were checked."""
    path = RUNS / "h200_promises.jsonl"
    for row in read_lines(path):
        yield from _tried(_CASES[row["workload"]], row["tried"], path.stem)


def _searches() -> Iterator[Step]:
    """Yield the steps of searches that were timed as a whole."""
    path = RUNS / "h200_search_seconds.jsonl"
    for row in read_lines(path):
        for side in ("new", "old"):
            yield from _tried(_CASES[row["workload"]], row[side]["tried"], path.stem)


def _tried(subject: Subject, rows: list[Document], source: str) -> Iterator[Step]:
    """Yield the completed trials of a search, whose candidates are recorded in words."""
    for row in rows:
        candidate = read_candidate(row["candidate"])
        if candidate is not None and row.get("samples_per_second"):
            seconds = candidate.samples_per_step / row["samples_per_second"]
            share = row.get("gpu_busy_share")
            yield Step(subject, candidate, seconds, seconds * share if share else None, source)


def read_candidate(text: str) -> Candidate | None:
    """Parse a candidate such as ``32 × 1  bf16, checkpointing``; ``None`` for one with further settings."""
    found = re.fullmatch(r"(\d+) × (\d+)  (\w+)(, checkpointing)?(, pinned to one core)?", text)
    if found is None:
        return None
    arm = Arm(found[3], bool(found[4]), cpu_affinity=bool(found[5]))  # type: ignore[arg-type]
    return Candidate(arm, int(found[1]), int(found[2]))


@dataclass(frozen=True)
class Published:
    """A training throughput that somebody published for one GPU."""

    gpu: str
    subject: Subject
    candidate: Candidate
    samples_per_second: float
    source: str
    """The name under which title, address, date and settings are told."""
    is_stock: bool
    """Whether a stock Trainer was measured; else the settings of the source say what differs."""


PUBLISHED = LANDSCAPES / "published_throughputs.json"


def published() -> list[Published]:
    """Return the published throughputs.

    A head that only sees the masked tokens is taken for one that sees none, as is one that marks an answer.
    """
    document = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    found = []
    for row in document["rows"]:
        known = dict(zip(document["columns"], row, strict=True))
        arm = Arm(
            known["precision"],
            known["gradient_checkpointing"],
            attn_implementation=known["attn_implementation"],
        )
        candidate = Candidate(arm, known["per_device_train_batch_size"], known["gradient_accumulation_steps"])
        is_stock = document["sources"][known["source"]]["comparable"] == "stock"
        subject = Subject(known["model"], known["seq_len"])
        found.append(
            Published(known["gpu"], subject, candidate, known["samples_per_second"], known["source"], is_stock)
        )
    return found


def traced_arm(arm: Arm) -> Arm:
    """Return the arm under which the operations of this arm's steps are recorded."""
    twins: dict[str, Any] = {"bf16": "fp16", "tf32": "fp32"}
    return replace(arm, precision=twins.get(arm.precision, arm.precision), cpu_affinity=False, dataloader_num_workers=0)


def operations_key(subject: Subject, arm: Arm) -> str:
    """Return the name under which the operations of a step are recorded."""
    traced = traced_arm(arm)
    return "|".join(map(str, (subject.model, subject.seq_len, subject.task, traced.precision,
                              traced.gradient_checkpointing, traced.attn_implementation, traced.optim)))  # fmt: skip


@functools.cache
def recorded_operations() -> dict[str, Operations]:
    """Return the recorded operations of each step, by ``operations_key``."""
    with gzip.open(OPERATIONS, "rt", encoding="utf-8") as file:
        return {key: decode(document, Operations) for key, document in json.load(file).items()}
