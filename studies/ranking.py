"""Compare the candidate that is predicted to be the fastest with the one that was measured to be.

    python studies/ranking.py

A landscape is all candidates of a model that one recording has; those that ran out of memory are in none. No
measurement of the machine is used.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from recorded_steps import Subject
from step_times import H200, known_steps

from autotune.core.candidate import Candidate
from autotune.estimate.step_time import StepTimeModel

_FEWEST_CANDIDATES = 5
NEAR = 0.03


@dataclass(frozen=True)
class Landscape:
    """The measured and the predicted samples a second of every candidate of one recording."""

    source: str
    subject: Subject
    measured: dict[Candidate, float]
    predicted: dict[Candidate, float]

    @property
    def chosen(self) -> Candidate:
        """Return the candidate that is predicted to be the fastest."""
        return max(self.predicted, key=self.predicted.__getitem__)

    @property
    def loss(self) -> float:
        """Return how much slower than the best the chosen candidate is."""
        return 1 - self.measured[self.chosen] / max(self.measured.values())


def landscapes() -> list[Landscape]:
    """Return every recording of a model that has enough candidates."""
    model = StepTimeModel(H200)
    speeds: dict[tuple[str, Subject], dict[Candidate, list[float]]] = {}
    predicted: dict[tuple[str, Subject], dict[Candidate, float]] = {}
    for step, operations in known_steps():
        key, candidate = (step.source, step.subject), step.candidate
        if candidate.arm.cpu_affinity:
            continue
        speeds.setdefault(key, {}).setdefault(candidate, []).append(candidate.samples_per_step / step.step_seconds)
        predicted.setdefault(key, {})[candidate] = model.predict(operations, candidate).samples_per_second
    return [
        Landscape(*key, {c: statistics.median(each) for c, each in found.items()}, predicted[key])
        for key, found in speeds.items()
        if len(found) >= _FEWEST_CANDIDATES
    ]


def main() -> None:
    """Print one line a landscape."""
    every = landscapes()
    print(f"{'recording':<48}{'model':<34}{'candidates':>10}  {'predicted the fastest':<34}{'slower than best':>16}")
    for known in every:
        name = f"{known.subject.model.rpartition('/')[2]} {known.subject.seq_len or ''} {known.subject.task or ''}"
        told = f"{known.source:<48}{name:<34}{len(known.measured):>10}  {known.chosen.describe():<34}"
        print(f"{told}{known.loss:>16.1%}")
    near = sum(known.loss <= NEAR for known in every)
    print(f"within {NEAR:.0%} of the best: {near} of {len(every)}")


if __name__ == "__main__":
    main()
