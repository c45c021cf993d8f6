"""Compare recorded times of the kernels of training steps with predictions, by class of operation.

    python studies/kernel_times.py trace FILE.jsonl[.gz]
    python studies/kernel_times.py compare FILE.jsonl[.gz]
    python studies/kernel_times.py fit FILE.jsonl[.gz]

``studies/landscapes/kernel_times_h200.jsonl.gz`` was recorded on an H200 (torch 2.11, November 2026) with
``torch.profiler`` and CUDA activity alone. A line is a model, arm and batch; it has the time of each kernel by name,
for three parts of a step: a micro-step whose gradients are the first, one that adds to them, and the update.

``trace`` records what the steps of all cells consist of, so that ``compare`` need not trace them. ``compare`` prints
predicted and measured GPU time for each cell, and errors by part, by precision and by whether the model's family took
part in the fit. ``fit`` prints the constants of ``autotune/estimate/gpu_time.py``, fitted to the families whose GPU
times other recordings have as well: to their micro-steps here, as a whole and by class, and to those other recordings.
No other family takes part. ``fit`` needs scipy, and none of the three a GPU.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recorded_steps import Subject, read_lines
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
from autotune.core.outcome import kind_of_kernel, merge_kinds
from autotune.estimate.gpu_time import EFFICIENCIES, Efficiencies, GpuModel, GpuTime, gpu_time

_NS = 1e-9


def trace_all(path: Path) -> None:
    """Record the operations of the steps of all cells."""
    trace([(Subject(row["model"], row["seq_len"], row["task"]), Arm(**row["arm"])) for row in measured_cells(path)])


def compare(path: Path) -> None:
    """Print predicted and measured GPU times."""
    rows = read_lines(path)
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


def measured_cells(path: Path) -> list[Document]:
    """Return each recorded cell once: the first of those that were recorded again, with their operations."""
    return list({_key(row): row for row in reversed(read_lines(path)) if "gpu_seconds" in row}.values())[::-1]


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
    """Return the errors of a cell's prediction: of micro-step, update, and classes of kernels."""
    predicted = predicted_for(row, efficiencies)
    pairs = parts(predicted, row)
    ours, theirs = merge_kinds(predicted.by_kind), merge_kinds(_measured_kinds(row, ("first_micro_step",)))
    whole = pairs[_MICRO_STEP][1]
    found = [math.log(one / other) for one, other in (pairs[_MICRO_STEP], pairs["update"])]
    return found + [(ours.get(kind, 0.0) - theirs.get(kind, 0.0)) / whole for kind in _FITTED_KINDS]


def parts(predicted: GpuTime, row: Document) -> dict[str, tuple[float, float]]:
    """Return predicted and measured seconds of each part of a step, by its name."""
    seconds, micro_step = row["gpu_seconds"], predicted.forward + predicted.backward
    return {
        _MICRO_STEP: (micro_step, seconds["first_micro_step"]),
        "further micro-step": (micro_step + predicted.accumulation, seconds["further_micro_step"]),
        "update": (predicted.update, seconds["update"]),
    }


def _add_kinds(kinds: dict[str, list[tuple[float, float]]], predicted: GpuTime, row: Document) -> None:
    """Add the predicted and measured seconds of each class of kernels in one micro-step and update."""
    ours, theirs = merge_kinds(predicted.by_kind), merge_kinds(_measured_kinds(row, ("first_micro_step", "update")))
    for kind in {**ours, **theirs}:
        kinds.setdefault(kind, []).append((ours.get(kind, 0.0), theirs.get(kind, 0.0)))


def _measured_kinds(row: Document, parts: Sequence[str]) -> dict[str, float]:
    """Return the measured seconds of each class of kernels, by the classes of today; the recording has fewer."""
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
    runs = {"trace": trace_all, "compare": compare, "fit": fit}
    for name in runs:
        commands.add_parser(name).add_argument("file", type=Path)
    given = parser.parse_args()
    runs[given.command](given.file)


if __name__ == "__main__":
    main()
