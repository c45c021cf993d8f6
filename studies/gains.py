"""Compare what an option gains as predicted and as measured, on pairs of recorded steps that differ in it alone.

    python studies/gains.py

Both steps of a pair are of one recording, model and batch. The factor is how many times as long the step takes without
the option as with it. The order is wrong where the measured factor is 3 % or more off 1, and the predicted one is on
the other side. No measurement of the machine is used, and no GPU is needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recorded_steps import Subject
from step_times import H200, known_steps

from autotune.core.candidate import Arm, Candidate
from autotune.estimate.step_time import StepTime, StepTimeModel

_CLEAR = 0.03


@dataclass(frozen=True)
class Pair:
    """The factor between two steps that differ in one option."""

    measured: float
    predicted: float
    waits: bool
    """Whether the host limits one of the steps."""

    @property
    def error(self) -> float:
        """Return the relative error of the predicted factor."""
        return abs(self.predicted / self.measured - 1)

    @property
    def is_reversed(self) -> bool:
        """Return whether the slower one of the two is clear and predicted to be the faster."""
        return (self.measured > 1 + _CLEAR and self.predicted < 1) or (
            self.measured < 1 - _CLEAR and self.predicted > 1
        )


Recording = tuple[str, Subject]
"""A file, and what it has steps of."""

OPTIONS: dict[str, tuple[Callable[[Arm], bool], Callable[[Arm], Arm]]] = {
    "bf16 for fp16": (lambda arm: arm.precision == "fp16", lambda arm: replace(arm, precision="bf16")),
    "bf16 for tf32": (lambda arm: arm.precision == "tf32", lambda arm: replace(arm, precision="bf16")),
    "tf32 for fp32": (lambda arm: arm.precision == "fp32", lambda arm: replace(arm, precision="tf32")),
    "no checkpointing": (
        lambda arm: arm.gradient_checkpointing,
        lambda arm: replace(arm, gradient_checkpointing=False),
    ),
    "sdpa for eager": (
        lambda arm: arm.attn_implementation == "eager",
        lambda arm: replace(arm, attn_implementation="sdpa"),
    ),
}
"""What an arm must be, and the arm that it is compared with."""


def pairs(option: str) -> list[Pair]:
    """Return every pair of recorded steps that differ in an option."""
    model = StepTimeModel(H200)
    seconds: dict[tuple[Recording, Candidate], list[float]] = {}
    predicted: dict[tuple[Recording, Candidate], StepTime] = {}
    for step, operations in known_steps():
        key = (step.source, step.subject), step.candidate
        seconds.setdefault(key, []).append(step.step_seconds)
        predicted[key] = model.predict(operations, step.candidate)
    applies, changed = OPTIONS[option]
    found = []
    for key in seconds:
        where, candidate = key
        twin = where, replace(candidate, arm=changed(candidate.arm))
        if applies(candidate.arm) and twin in seconds:
            found.append(
                Pair(
                    statistics.median(seconds[key]) / statistics.median(seconds[twin]),
                    predicted[key].seconds / predicted[twin].seconds,
                    "host" in (predicted[key].limited_by, predicted[twin].limited_by),
                )
            )
    return found


def _line(name: str, found: Sequence[Pair]) -> str:
    if not found:
        return f"{name:<44}{0:>5}"
    measured, errors = sorted(pair.measured for pair in found), sorted(pair.error for pair in found)
    factors = f"{statistics.median(measured):>8.2f}{measured[0]:>7.2f} to {measured[-1]:.2f}"
    factors += f"{statistics.median(pair.predicted for pair in found):>11.2f}"
    ninety = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return (
        f"{name:<44}{len(found):>5}{factors}{statistics.median(errors):>8.1%}{ninety:>8.1%}"
        f"{sum(pair.is_reversed for pair in found):>7}"
    )


def main() -> None:
    """Print the table."""
    print(f"{'option':<44}pairs  factor, from to      predicted   error  90 of 100  reversed")
    for option in OPTIONS:
        found = pairs(option)
        print(_line(f"{option}, limited by the GPU", [pair for pair in found if not pair.waits]))
        print(_line(f"{option}, limited by the host", [pair for pair in found if pair.waits]))


if __name__ == "__main__":
    main()
