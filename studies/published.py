"""Compare predicted with published training throughputs, on GPUs that were not at hand.

    python studies/published.py

``studies/landscapes/published_throughputs.json`` has each throughput with its source, date and settings. Throughputs
of the H200 are told apart: constants were fitted to that GPU, so they show what the other software makes of it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

from recorded_steps import Published, operations_key, published, recorded_operations
from step_times import error_line

from autotune.core.device import Calibration
from autotune.devices.gpus import CHIPS
from autotune.estimate.advice import SCALED_DOUBT
from autotune.estimate.gpu_time import calibrated
from autotune.estimate.step_time import StepTime, StepTimeModel

FITTED = "h200"
Pair = tuple[Published, StepTime]
_HALVES = 200


def published_predictions() -> list[Pair]:
    """Return each published throughput with the predicted step time."""
    operations = recorded_operations()
    found = []
    for known in published():
        of_step = operations[operations_key(known.subject, known.candidate.arm)]
        found.append((known, StepTimeModel(CHIPS[known.gpu]).predict(of_step, known.candidate)))
    return found


def is_inside(pair: Pair) -> bool:
    """Return whether a throughput lies in its interval."""
    known, predicted = pair
    low, high = predicted.interval_samples_per_second
    return low <= known.samples_per_second <= high


def error(pair: Pair) -> float:
    """Return the relative error of a prediction."""
    known, predicted = pair
    return predicted.samples_per_second / known.samples_per_second - 1


def held_out(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """Return the median factor that half of the GPUs ask for, and the least and median coverage of the others.

    The factor is the least one, to both sides, that holds 80 % of the throughputs of a half.
    """
    gpus = sorted({known.gpu for known, _ in pairs})
    misses = {gpu: [abs(math.log(1 + error(pair))) for pair in pairs if pair[0].gpu == gpu] for gpu in gpus}
    factors, coverages = [], []
    for seed in range(_HALVES):
        half = set(random.Random(seed).sample(gpus, len(gpus) // 2))
        own = sorted(miss for gpu in half for miss in misses[gpu])
        width = own[math.ceil(0.8 * len(own)) - 1]
        others = [miss for gpu in gpus if gpu not in half for miss in misses[gpu]]
        factors.append(math.exp(width))
        coverages.append(sum(miss <= width for miss in others) / len(others))
    return statistics.median(factors), min(coverages), statistics.median(coverages)


_BASES = ("h200", "a100-80gb", "h100-80gb", "rtx-3090")


def scaled(pairs: Sequence[Pair]) -> list[float]:
    """Return measured over predicted throughputs of each GPU, after a correction by the throughputs of another GPU.

    Only throughputs of Lambda are taken, which has the same software and models on all GPUs. What float32 says of
    TF32 is taken for what it says of GPUs without.
    """
    own = [pair for pair in pairs if pair[0].source.startswith("lambda")]

    def key(known: Published) -> tuple[str, bool]:
        return known.subject.model, known.candidate.arm.precision == "fp16"

    ratios = []
    for base in _BASES:
        factors = {key(known): 1 + error((known, predicted)) for known, predicted in own if known.gpu == base}
        ratios += [factors[key(pair[0])] / (1 + error(pair)) for pair in own if pair[0].gpu != base]
    return ratios


# TFLOP/s of large matrix products in 16 bits, and in TF32 or float32 (github.com/mli/transformers-benchmarks, README).
_PRODUCTS: dict[str, tuple[float, str, float]] = {
    "a100-80gb": (230, "tf32", 116),
    "a6000": (95, "tf32", 60),
    "v100-16gb": (95, "fp32", 14),
    "v100-32gb": (95, "fp32", 14),
    "rtx-4090": (172, "tf32", 86),
}


def calibrated_errors() -> list[tuple[str, float, float]]:
    """Return the median errors by precision without and with published micro-benchmarks as a calibration."""
    operations = recorded_operations()
    errors: dict[str, list[tuple[float, float]]] = {}
    for known in published():
        if known.gpu not in _PRODUCTS:
            continue
        half, kind, single = _PRODUCTS[known.gpu]
        measured = Calibration(4096, {"half": half * 1e12, kind: single * 1e12}, None, 0.0, 0.0)
        of_step = operations[operations_key(known.subject, known.candidate.arm)]
        plain, corrected = (
            StepTimeModel(chip).predict(of_step, known.candidate)
            for chip in (CHIPS[known.gpu], calibrated(CHIPS[known.gpu], measured))
        )
        pair = abs(error((known, plain))), abs(error((known, corrected)))
        errors.setdefault(known.candidate.arm.precision, []).append(pair)
    return [
        (precision, statistics.median(before for before, _ in each), statistics.median(after for _, after in each))
        for precision, each in sorted(errors.items())
    ]


def main() -> None:
    """Print each throughput, the errors and the coverage."""
    pairs = published_predictions()
    head = f"{'GPU':<15}{'model':<24}{'candidate':<36}{'published':>10}{'predicted':>10}{'error':>8}"
    print(f"{head}  {'interval':<18}")
    for known, predicted in sorted(pairs, key=lambda pair: pair[0].gpu):
        low, high = predicted.interval_samples_per_second
        name = known.subject.model.rpartition("/")[2] + (f" {known.subject.seq_len}" if known.subject.seq_len else "")
        told = f"{known.gpu:<15}{name:<24}{known.candidate.describe():<36}{known.samples_per_second:>10.1f}"
        told += f"{predicted.samples_per_second:>10.1f}{error((known, predicted)):>+8.0%}"
        told += f"  {low:.1f} to {high:.1f}".ljust(20)
        print(told + ("" if is_inside((known, predicted)) else "  outside ") + f"  {known.source}")
    others = [pair for pair in pairs if pair[0].gpu != FITTED]
    print(f"\n{'relative error':<58}   n   median  90 of 100  most    bias")
    print(error_line("other GPUs", [error(pair) for pair in others]))
    for name, chosen in (("stock Trainer", True), ("other training code", False)):
        print(error_line(f"  {name}", [error(pair) for pair in others if pair[0].is_stock == chosen]))
    for precision in ("fp16", "tf32", "fp32"):
        own = [error(pair) for pair in others if pair[0].candidate.arm.precision == precision]
        print(error_line(f"  {precision}", own))
    for gpu in sorted({known.gpu for known, _ in others}):
        print(error_line(f"  {gpu}", [error(pair) for pair in others if pair[0].gpu == gpu]))
    print(error_line("the H200, with the other software", [error(p) for p in pairs if p[0].gpu == FITTED]))
    inside = sum(map(is_inside, others))
    print(f"in the printed interval: {inside} of {len(others)} ({inside / len(others):.0%})")
    factor, least, median = held_out(others)
    print(
        f"a factor that holds 80 % of half of the GPUs ({_HALVES} halves): {factor:.2f} in the median; it holds "
        f"{median:.0%} of the others in the median, {least:.0%} at least"
    )

    ratios = scaled(pairs)
    held = sum(1 / SCALED_DOUBT <= ratio <= SCALED_DOUBT for ratio in ratios)
    print(
        f"scaled from another GPU: {held} of {len(ratios)} ({held / len(ratios):.0%}) within a factor of "
        f"{SCALED_DOUBT}, median error {statistics.median(abs(1 / ratio - 1) for ratio in ratios):.1%}"
    )
    for precision, before, after in calibrated_errors():
        print(f"calibrated by published micro-benchmarks, {precision}: median error {before:.1%}, then {after:.1%}")


if __name__ == "__main__":
    main()
