"""Compare GPUs for one training job: how their speed is known, hours, cost and the Pareto front."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
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
    """A predicted or measured optimizer step, with a grade that says what its time rests on."""

    step: StepTime
    grade: Grade
    joules_per_sample: float | None = None
    """Measured; ``None`` where it was not."""


class Grades:
    """Replaces predicted step times by measured ones, or scales them by measurements on this GPU or on other GPUs.

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
        """Return the best known time of a predicted step on this chip: measured, or predicted and corrected."""
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
        factor = self._measured_over_predicted(chip, step)
        if factor is None:
            return Graded(step, "predicted")
        seconds = step.seconds * factor
        interval = seconds / SCALED_DOUBT, seconds * SCALED_DOUBT
        return Graded(replace(step, seconds=seconds, interval_seconds=interval), "scaled")

    def _measured_over_predicted(self, chip: Chip, step: StepTime) -> float | None:
        """Return the median of measured over predicted time of steps with the same precision and limit (GPU or host).

        Steps measured on this GPU come first. ``None`` without such measurements, and for several ranks.
        """
        arm = step.candidate.arm
        if arm.ranks > 1:
            return None
        kind = arm.precision, step.limited_by == "host"
        on_any = [ratio for (_, *other), ratios in self._factors.items() if tuple(other) == kind for ratio in ratios]
        known = self._factors.get((chip.name, *kind)) or on_any
        return statistics.median(known) if known else None


_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Offer:
    """One or several equal GPUs for the job."""

    chip: Chip
    graded: Graded | None
    """The fastest candidate that fits; ``None`` where none does or speed is not predicted."""
    why_not: str | None
    """Why there is no such candidate."""
    samples: float
    """Samples that the job trains on, each counted as often as it is used."""
    price_of_one: float | None
    """Price of an hour of one GPU; ``None`` where it is not known."""
    gpus: int = 1

    @property
    def best(self) -> StepTime | None:
        """The step of the fastest candidate."""
        return None if self.graded is None else self.graded.step

    @property
    def price_per_hour(self) -> float | None:
        """Price of an hour on all GPUs."""
        return None if self.price_of_one is None else self.price_of_one * self.gpus

    @property
    def hours(self) -> float | None:
        """Duration of the job; ``None`` where no candidate fits or speed is not predicted."""
        return None if self.best is None else self._hours(self.best.seconds)

    @property
    def interval_hours(self) -> tuple[float, float] | None:
        """Shortest and longest likely duration of the job."""
        if self.best is None:
            return None
        low, high = self.best.interval_seconds
        return self._hours(low), self._hours(high)

    def _hours(self, step_seconds: float) -> float:
        """Return the duration of the job with steps of this duration."""
        assert self.best is not None
        return self.samples / self.best.candidate.samples_per_step * step_seconds / _SECONDS_PER_HOUR

    @property
    def cost(self) -> float | None:
        """Cost of the job; ``None`` without a price."""
        return None if self.hours is None or self.price_per_hour is None else self.hours * self.price_per_hour

    @property
    def interval_cost(self) -> tuple[float, float] | None:
        """Lowest and highest likely cost of the job."""
        if self.interval_hours is None or self.price_per_hour is None:
            return None
        low, high = self.interval_hours
        return low * self.price_per_hour, high * self.price_per_hour

    @property
    def most_joules_per_sample(self) -> float | None:
        """Energy of a sample with all GPUs at their power limit; ``None`` where speed is not predicted."""
        if self.best is None or self.chip.rates is None:
            return None
        return self.gpus * self.chip.rates.power_watts / self.best.samples_per_second


def sort_offers(offers: Sequence[Offer]) -> list[Offer]:
    """Return offers by cost, then offers without a price by hours, then offers on which the job does not fit."""

    def key(offer: Offer) -> tuple[int, float]:
        """Return the group of an offer, and its place in the group."""
        if offer.cost is not None:
            return 0, offer.cost
        return (1, offer.hours) if offer.hours is not None else (2, 0.0)

    return sorted(offers, key=key)


def rank(offer: Offer, offers: Sequence[Offer]) -> int | None:
    """Return 1 + the number of offers that are surely cheaper: their highest cost is below this offer's lowest.

    Offers with overlapping intervals share a rank. Where no offer has a price, hours are compared. Otherwise offers
    without a price have no rank.
    """
    has_prices = any(o.interval_cost is not None for o in offers)
    own = offer.interval_cost if has_prices else offer.interval_hours
    if own is None:
        return None
    others = [o.interval_cost if has_prices else o.interval_hours for o in offers]
    return 1 + sum(other is not None and other[1] < own[0] for other in others)


def pareto_front(offers: Sequence[Offer]) -> list[Offer]:
    """Return the Pareto-optimal offers by predicted hours and cost.

    An offer is left out where another is no worse in both and better in one, or where its hours or cost are unknown.
    """
    known = [(o, o.hours, o.cost) for o in offers if o.hours is not None and o.cost is not None]
    return [
        offer
        for offer, hours, cost in known
        if not any(h <= hours and c <= cost and (h, c) != (hours, cost) for _, h, c in known)
    ]
