"""Grade how a GPU's speed is known: measured on it, scaled from a measurement on another GPU, or predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autotune.core.candidate import Arm
from autotune.core.device import Precision
from autotune.core.prediction import Operations
from autotune.devices.gpus import CHIPS, Chip
from autotune.estimate.pooling import Pool
from autotune.estimate.step_time import StepTime, StepTimeModel

Grade = Literal["measured", "scaled", "predicted"]

SCALED_DOUBT = 1.45
"""Factor to either side of a scaled step time. It holds 92 % of 240 published throughputs of 16 GPUs, each scaled from
those of an H200, A100, H100 or RTX 3090 with the same software (studies/published.py)."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A step with what its time rests on."""

    step: StepTime
    grade: Grade
    joules_per_sample: float | None = None
    """Measured; ``None`` where it was not."""


class Grades:
    """Replaces predicted step times by measured ones, or scales them by what measurements on other GPUs say.

    ``pools`` has the measured trials of this workload by the name of the chip.
    """

    def __init__(self, pools: Mapping[str, Pool], operations: Callable[[Arm, Chip], Operations | None]) -> None:
        self._pools = pools
        self._factors: dict[tuple[str, Precision, bool], list[float]] = {}
        for name, pool in pools.items():
            model = StepTimeModel(CHIPS[name])
            for candidate in pool.candidates():
                traced = operations(candidate.arm, CHIPS[name]) if candidate.arm.ranks == 1 else None
                speed = pool.speed(candidate)
                if traced is not None and speed is not None:
                    predicted = model.predict(traced, candidate)
                    key = name, candidate.arm.precision, predicted.limited_by == "host"
                    ratio = predicted.samples_per_second / speed.samples_per_second
                    self._factors.setdefault(key, []).append(ratio)

    def graded(self, chip: Chip, step: StepTime) -> Graded:
        """Return the best that is known of a predicted step on this chip."""
        candidate = step.candidate
        pool = self._pools.get(chip.name)
        speed = pool.speed(candidate) if pool is not None else None
        if pool is not None and speed is not None:
            low, high = speed.interval()
            samples = candidate.samples_per_step
            measured = replace(
                step, seconds=samples / speed.samples_per_second, interval_seconds=(samples / high, samples / low)
            )
            measurement = pool.pooled(candidate).measurement
            return Graded(measured, "measured", measurement.joules_per_sample if measurement is not None else None)
        factor = self._factor(chip, step)
        if factor is None:
            return Graded(step, "predicted")
        seconds = step.seconds * factor
        interval = seconds / SCALED_DOUBT, seconds * SCALED_DOUBT
        return Graded(replace(step, seconds=seconds, interval_seconds=interval), "scaled")

    def _factor(self, chip: Chip, step: StepTime) -> float | None:
        """Return measured over predicted time of steps in the same precision that the GPU, or the host, limits as well.

        Those of this GPU come first. ``None`` where nothing of the kind was measured, and for several ranks.
        """
        arm = step.candidate.arm
        if arm.ranks > 1:
            return None
        kind = arm.precision, step.limited_by == "host"
        own = self._factors.get((chip.name, *kind))
        if own is not None:
            return statistics.median(own)
        others = [ratio for (_, *other), ratios in self._factors.items() if tuple(other) == kind for ratio in ratios]
        return statistics.median(others) if others else None
