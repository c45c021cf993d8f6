"""Compare predicted with measured GPU time and step time, on every step that was recorded on an H200.

    python studies/step_times.py compare
    python studies/step_times.py trace

``compare`` prints the errors of the constants in ``autotune/estimate``. ``trace`` writes what the steps of every
recorded model and arm consist of to ``studies/landscapes/operations.json.gz``, and leaves what is there as it is.
Neither needs a GPU.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recorded_steps import (
    OPERATIONS,
    Step,
    Subject,
    operations_key,
    published,
    recorded_operations,
    recorded_steps,
    traced_arm,
)

from autotune.core.candidate import Arm, Candidate
from autotune.core.prediction import Operations
from autotune.core.schema import decode, encode
from autotune.devices.gpus import CHIPS
from autotune.estimate.gpu_time import EFFICIENCIES, Efficiencies, GpuModel, GpuTime, gpu_time
from autotune.estimate.step_time import HostSpeed, StepTimeModel, step_seconds

H200 = CHIPS["h200"]
RELATIVE_ERROR = 0.03
"""Of a cell, as the fit weighs it against the priors."""
_PRIOR = 0.3
"""How far a constant may go from its default, as the logarithm of their ratio."""
_PRIORS = {
    "elementwise": 0.15,
    "product_overhead": 0.6,
    "unaligned_half_products": 0.5,
    "unaligned_tf32_products": 0.5,
    **dict.fromkeys((name for name in asdict(EFFICIENCIES) if name.startswith(("flash", "efficient", "float32"))), 0.8),
}
"""Of some constants, of which less was known."""
MOST_OF_A_FAMILY = 4
"""Cells of a family beyond so many count less, so that no family outweighs the others."""
_LARGE_KERNELS_SECONDS = 90e-6
"""Steps whose kernels take longer on average are limited by the GPU: their time stands for its time, less the gaps."""
_GAP_SECONDS = 0.004


@dataclass(frozen=True)
class Cell:
    """The median GPU time of all recordings of one candidate."""

    subject: Subject
    candidate: Candidate
    operations: Operations
    seconds: float

    def predicted(self, efficiencies: Efficiencies) -> float:
        """Return the predicted GPU time."""
        return self.gpu(efficiencies).of_step(self.candidate.gradient_accumulation_steps)

    def gpu(self, efficiencies: Efficiencies) -> GpuTime:
        """Return the predicted GPU time in parts."""
        assert H200.rates is not None
        model = GpuModel(H200.rates, self.candidate.arm.precision, efficiencies)
        batch, accumulation = (
            self.candidate.per_device_train_batch_size,
            self.candidate.gradient_accumulation_steps,
        )
        return gpu_time(self.operations, model, batch, accumulation)


def traced(subject: Subject, arm: Arm) -> Operations | None:
    """Trace a step in a forked process, as tracing patches torch; return its operations, or ``None`` on failure."""
    from autotune.worker.fake.step import FakeTraining

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        training = FakeTraining(subject.workload(), traced_arm(arm), H200)
        training.step()
        with os.fdopen(writing, "w") as file:
            json.dump(encode(training.operations), file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return decode(json.loads(text), Operations) if text else None


def trace(wanted: Iterable[tuple[Subject, Arm]]) -> None:
    """Record the operations of each model and arm that are not recorded yet."""
    arms = {operations_key(subject, arm): (subject, arm) for subject, arm in wanted}
    found = recorded_operations() if OPERATIONS.exists() else {}
    for key, (subject, arm) in arms.items():
        if key not in found:
            started = time.monotonic()
            operations = traced(subject, arm)
            print(f"{key}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
            if operations is not None:
                found[key] = operations
    with gzip.open(OPERATIONS, "wt", encoding="utf-8", compresslevel=9) as file:
        json.dump(encode(found), file)


def trace_recorded() -> None:
    """Record the operations of every step that was recorded or published."""
    recorded = [(step.subject, step.candidate.arm) for step in recorded_steps()]
    trace(recorded + [(known.subject, known.candidate.arm) for known in published()])


def operations_of(subject: Subject, arm: Arm) -> Operations:
    """Return the operations of a step, recorded or traced now."""
    operations = recorded_operations().get(operations_key(subject, arm)) or traced(subject, arm)
    assert operations is not None
    return operations


def known_steps() -> list[tuple[Step, Operations]]:
    """Return every recorded step whose operations are known."""
    keys = ((step, operations_key(step.subject, step.candidate.arm)) for step in recorded_steps())
    return [(step, operations) for step, key in keys if (operations := recorded_operations().get(key)) is not None]


def cells(steps: Sequence[tuple[Step, Operations]]) -> tuple[list[Cell], list[Cell]]:
    """Return the cells whose GPU time was measured, and those whose step time stands for it."""
    grouped: dict[Any, list[tuple[Step, Operations]]] = {}
    for step, operations in steps:
        arm = dataclasses.replace(step.candidate.arm, cpu_affinity=False, dataloader_num_workers=0)
        grouped.setdefault((step.subject, dataclasses.replace(step.candidate, arm=arm)), []).append((step, operations))
    measured, limited = [], []
    for (subject, candidate), members in grouped.items():
        operations = members[0][1]
        busy = [step.gpu_seconds for step, _ in members if step.gpu_seconds is not None]
        if busy:
            measured.append(Cell(subject, candidate, operations, statistics.median(busy)))
            continue
        accumulation = candidate.gradient_accumulation_steps
        seconds = statistics.median(step.step_seconds for step, _ in members)
        kernels = sum(row.count for row in operations.rows if row.part != "update")
        if seconds / accumulation / kernels > _LARGE_KERNELS_SECONDS:
            left = seconds - _GAP_SECONDS * (accumulation + 1)
            limited.append(Cell(subject, candidate, operations, left))
    return measured, limited


def fitted(
    known: Sequence[Cell],
    start: Efficiencies = EFFICIENCIES,
    more: Callable[[Efficiencies], list[float]] = lambda _: [],
) -> Efficiencies:
    """Return the constants that predict these cells best, held near ``start`` where cells say little.

    ``more`` returns further residuals, each an error over the one that is usual.
    """
    import numpy as np
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    names = [field.name for field in dataclasses.fields(Efficiencies) if field.name != "half_rate_products"]
    of_family = Counter(cell.subject.family for cell in known)
    weights = [math.sqrt(min(1.0, MOST_OF_A_FAMILY / of_family[cell.subject.family])) for cell in known]

    def moved(values: Any) -> Efficiencies:
        changes = {name: getattr(start, name) * math.exp(value) for name, value in zip(names, values, strict=True)}
        return dataclasses.replace(start, **changes)

    def residuals(values: Any) -> Any:
        efficiencies = moved(values)
        misses = [
            weight * math.log(cell.predicted(efficiencies) / cell.seconds) / RELATIVE_ERROR
            for cell, weight in zip(known, weights, strict=True)
        ]
        priors = [value / _PRIORS.get(name, _PRIOR) for name, value in zip(names, values, strict=True)]
        return np.array(misses + more(efficiencies) + priors)

    solution = least_squares(residuals, np.zeros(len(names)), diff_step=1e-3, max_nfev=12, loss="soft_l1")
    return moved(solution.x)


def error_line(name: str, errors: Sequence[float]) -> str:
    """Return a row of the table of errors."""
    ordered = sorted(abs(error) for error in errors)
    if not ordered:
        return f"{name:<58}   0"
    ninety = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    return (
        f"{name:<58}{len(ordered):>4}{statistics.median(ordered):>9.1%}{ninety:>9.1%}{ordered[-1]:>9.1%}"
        f"{statistics.median(errors):>+9.1%}"
    )


# Where a fit begins.
ROUND_NUMBERS = Efficiencies(
    half_products=0.75,
    tf32_products=0.55,
    fp32_products=0.8,
    unaligned_half_products=0.3,
    unaligned_tf32_products=0.45,
    product_overhead=120.0,
    product_traffic=0.9,
    flash_forward=0.45,
    flash_backward=0.4,
    efficient_forward=0.2,
    efficient_backward=0.2,
    float32_forward=0.55,
    float32_backward=0.55,
    flash_forward_ramp=200.0,
    flash_backward_ramp=200.0,
    flash_backward_causal=150.0,
    flash_dropout=0.9,
    efficient_ramp=50.0,
    efficient_causal=150.0,
    efficient_dropout=0.2,
    convolution=0.5,
    elementwise=0.8,
    elementwise_cast=0.6,
    dropout=0.6,
    cast=0.5,
    copy=0.75,
    transpose=0.45,
    normalisation=0.65,
    normalisation_backward=0.4,
    softmax=0.45,
    reduction=0.4,
    gather=0.4,
    update=0.65,
    kernel_seconds=2.3e-6,
)


def compare() -> None:
    """Print the tables."""
    steps = known_steps()
    measured, _ = cells(steps)
    print(f"{'relative error':<58}   n   median  90 of 100  most    bias")
    print("GPU time (CUPTI):")
    _by(measured, lambda cell: cell.predicted(EFFICIENCIES) / cell.seconds - 1)
    _compare_steps(steps)


def _by(known: Sequence[Cell], error: Callable[[Cell], float]) -> None:
    print(error_line("  all", [error(cell) for cell in known]))
    for precision in ("bf16", "tf32"):
        of_precision = [cell for cell in known if cell.candidate.arm.precision == precision]
        print(error_line(f"  {precision}", [error(cell) for cell in of_precision]))


def _compare_steps(steps: Sequence[tuple[Step, Operations]]) -> None:
    """Print the errors of predicted step times, without and with a factor for the host of each recording."""
    model = StepTimeModel(H200)
    known = [(step, operations, model.predict(operations, step.candidate)) for step, operations in steps]
    factors = _host_factors(steps)
    print("Step time, no measurement of the machine:")
    print(error_line("  all", [predicted.seconds / step.step_seconds - 1 for step, _, predicted in known]))
    limits = dict.fromkeys(predicted.limited_by for *_, predicted in known)
    for limit in limits:
        errors = [p.seconds / step.step_seconds - 1 for step, _, p in known if p.limited_by == limit]
        print(error_line(f"  limited by {limit}", errors))
    inside = [p.interval_seconds[0] <= s.step_seconds <= p.interval_seconds[1] for s, _, p in known]
    print(f"  in its interval: {sum(inside)} of {len(inside)}")
    print("Step time, with one factor for the host of each recording:")
    calibrated = []
    for step, operations, _ in known:
        calibrated.append((step, _with_factor(step, operations, factors[step.source]) / step.step_seconds - 1))
    print(error_line("  all", [error for _, error in calibrated]))
    for source, factor in factors.items():
        errors = [error for step, error in calibrated if step.source == source]
        print(error_line(f"  {source[:44]} (× {factor:.2f})", errors))


def _with_factor(step: Step, operations: Operations, factor: float) -> float:
    """Return the predicted seconds of a step on a host that is slower by a factor."""
    candidate = step.candidate
    gpu = Cell(step.subject, candidate, operations, 0.0).gpu(EFFICIENCIES)
    return step_seconds(operations, gpu, HostSpeed().scaled(factor), candidate.gradient_accumulation_steps)


def _host_factors(steps: Sequence[tuple[Step, Operations]]) -> dict[str, float]:
    """Return for each recording the factor of the host's time that leaves the least median error."""
    found = {}
    for source in sorted({step.source for step, _ in steps}):
        own = [(step, operations) for step, operations in steps if step.source == source]

        def miss(factor: float, own: list[tuple[Step, Operations]] = own) -> float:
            return statistics.fmean(abs(math.log(_with_factor(s, o, factor) / s.step_seconds)) for s, o in own)

        found[source] = min((0.5 * 1.06**i for i in range(24)), key=miss)
    return found


if __name__ == "__main__":
    {"compare": compare, "trace": trace_recorded}[sys.argv[1]]()
