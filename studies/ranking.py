"""Compare the order of recorded steps as predicted and as measured: the fastest candidate, and what an option gains.

    python studies/ranking.py

A landscape is all candidates of a model that one recording has; those that ran out of memory are in none. The steps of
a pair are of one landscape and batch, and differ in one option alone. The factor of a pair is how many times as long
the step takes without the option as with it. The order is wrong where the measured factor is 3 % or more off 1, and the
predicted one is on the other side. No measurement of the machine is used, and no GPU is needed.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recorded_steps import Subject
from step_times import H200, known_steps

from autotune.core.candidate import Arm, Candidate
from autotune.estimate.step_time import StepTime, StepTimeModel

_FEWEST_CANDIDATES = 5
NEAR = 0.03


@dataclass(frozen=True)
class Landscape:
    """The candidates of a model in one recording."""

    source: str
    subject: Subject
    steps: dict[Candidate, tuple[float, StepTime]]
    """By candidate, the measured seconds of a step (the median of several) and the predicted ones."""

    @property
    def chosen(self) -> Candidate:
        """Return the candidate that is predicted to be the fastest."""
        return max(self.steps, key=lambda candidate: self.steps[candidate][1].samples_per_second)

    @property
    def loss(self) -> float:
        """Return how much slower than the best the chosen candidate is."""
        speeds = {candidate: candidate.samples_per_step / seconds for candidate, (seconds, _) in self.steps.items()}
        return 1 - speeds[self.chosen] / max(speeds.values())


@functools.cache
def recordings() -> list[Landscape]:
    """Return a landscape for every model of every recording."""
    model = StepTimeModel(H200)
    seconds: dict[tuple[str, Subject], dict[Candidate, list[float]]] = {}
    predicted: dict[tuple[str, Subject, Candidate], StepTime] = {}
    for step, operations in known_steps():
        of_model = seconds.setdefault((step.source, step.subject), {})
        of_model.setdefault(step.candidate, []).append(step.step_seconds)
        predicted[step.source, step.subject, step.candidate] = model.predict(operations, step.candidate)
    return [
        Landscape(*key, {c: (statistics.median(each), predicted[*key, c]) for c, each in found.items()})
        for key, found in seconds.items()
    ]


def landscapes() -> list[Landscape]:
    """Return the landscapes with enough candidates; candidates that are pinned to a core are left out."""
    found = []
    for known in recordings():
        steps = {candidate: step for candidate, step in known.steps.items() if not candidate.arm.cpu_affinity}
        if len(steps) >= _FEWEST_CANDIDATES:
            found.append(replace(known, steps=steps))
    return found


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
        """Return whether the predicted factor is on the other side of 1 than a clear measured factor."""
        return (self.measured > 1 + _CLEAR and self.predicted < 1) or (
            self.measured < 1 - _CLEAR and self.predicted > 1
        )


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
    applies, changed = OPTIONS[option]
    found = []
    for known in recordings():
        for candidate, (seconds, predicted) in known.steps.items():
            twin = replace(candidate, arm=changed(candidate.arm))
            if applies(candidate.arm) and twin in known.steps:
                twin_seconds, of_twin = known.steps[twin]
                waits = "host" in (predicted.limited_by, of_twin.limited_by)
                found.append(Pair(seconds / twin_seconds, predicted.seconds / of_twin.seconds, waits))
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
    """Print one line a landscape, then two lines an option."""
    every = landscapes()
    print(f"{'recording':<48}{'model':<34}{'candidates':>10}  {'predicted the fastest':<34}{'slower than best':>16}")
    for known in every:
        name = f"{known.subject.model.rpartition('/')[2]} {known.subject.seq_len or ''} {known.subject.task or ''}"
        told = f"{known.source:<48}{name:<34}{len(known.steps):>10}  {known.chosen.describe():<34}"
        print(f"{told}{known.loss:>16.1%}")
    near = sum(known.loss <= NEAR for known in every)
    print(f"within {NEAR:.0%} of the best: {near} of {len(every)}")
    print(f"\n{'option':<44}pairs  factor, from to      predicted   error  90 of 100  reversed")
    for option in OPTIONS:
        found = pairs(option)
        print(_line(f"{option}, limited by the GPU", [pair for pair in found if not pair.waits]))
        print(_line(f"{option}, limited by the host", [pair for pair in found if pair.waits]))


if __name__ == "__main__":
    main()
