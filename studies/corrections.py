"""How well a measured step corrects the predictions of others.

    python studies/corrections.py

Every pair of recorded steps of one model and recording on an H200 is taken: the first is measured, the second is
predicted, and its time multiplied by measured over predicted time of the first. Pairs of published throughputs of one
GPU, source and precision stand for other GPUs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

from published import error, published_predictions
from recorded_steps import Subject
from step_times import H200, known_steps

from autotune.core.candidate import Arm, Candidate
from autotune.estimate.step_time import StepTime, StepTimeModel

Known = tuple[StepTime, float]
"""A predicted step and its measured seconds."""


def pairs() -> list[tuple[Known, Known]]:
    """Return all pairs of steps of one recording and model that the GPU limits both, or the host."""
    model = StepTimeModel(H200)
    found: dict[tuple[str, Subject], dict[Candidate, list[float]]] = {}
    predicted: dict[tuple[str, Subject], dict[Candidate, StepTime]] = {}
    for step, operations in known_steps():
        if not step.candidate.arm.cpu_affinity:
            key = step.source, step.subject
            found.setdefault(key, {}).setdefault(step.candidate, []).append(step.step_seconds)
            predicted.setdefault(key, {})[step.candidate] = model.predict(operations, step.candidate)
    every = []
    for key, measured in found.items():
        known = [(predicted[key][candidate], statistics.median(each)) for candidate, each in measured.items()]
        every += [
            (first, second)
            for first, second in itertools.permutations(known, 2)
            if (first[0].limited_by == "host") == (second[0].limited_by == "host")
        ]
    return every


def off(first: Known, second: Known) -> float:
    """Return the factor by which the corrected prediction of the second is off, at least 1."""
    factor = first[1] / first[0].seconds
    return math.exp(abs(math.log(second[0].seconds * factor / second[1])))


def line(name: str, values: list[float], before: list[float] | None = None) -> str:
    """Return a row of the table."""
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.95)]
    told = f"{name:<46}{len(ordered):>6}" + "".join(f"{value:>8.3f}" for value in at)
    return told + (f"{statistics.median(before):>12.3f}" if before else "")


def main() -> None:
    """Print the table."""
    every = pairs()
    alike: dict[str, Callable[[Arm, Arm], bool]] = {
        "of one arm": lambda one, other: one == other,
        "of one precision": lambda one, other: one.precision == other.precision,
        "all": lambda one, other: True,
    }
    print(f"{'off by a factor of':<46}{'pairs':>6}  median  90 %    95 %  uncorrected, median")
    for limit in ("GPU", "host"):
        for name, is_alike in alike.items():
            chosen = [
                (first, second)
                for first, second in every
                if (first[0].limited_by == "host") == (limit == "host")
                and is_alike(first[0].candidate.arm, second[0].candidate.arm)
            ]
            plain = [math.exp(abs(math.log(step.seconds / seconds))) for _, (step, seconds) in chosen]
            print(line(f"limited by the {limit}, {name}", [off(*pair) for pair in chosen], plain))
    others = [
        math.exp(abs(math.log((1 + error(first)) / (1 + error(second)))))
        for first, second in itertools.permutations(published_predictions(), 2)
        if (first[0].gpu, first[0].source, first[0].candidate.arm.precision)
        == (second[0].gpu, second[0].source, second[0].candidate.arm.precision)
    ]
    print(line("published, of one GPU, source and precision", others))


if __name__ == "__main__":
    main()
