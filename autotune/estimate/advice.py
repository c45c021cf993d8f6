"""Compare GPUs for one training job: hours, cost and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.chip import Chip
from autotune.estimate.grades import Graded
from autotune.estimate.step_time import StepTime

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Offer:
    """One or several equal GPUs for the job."""

    chip: Chip
    graded: Graded | None
    """The fastest candidate that fits; ``None`` where none does or speed is not predicted."""
    why_not: str | None
    """Why there is none."""
    samples: float
    price_of_one: float | None
    """For an hour of one GPU."""
    gpus: int = 1

    @property
    def best(self) -> StepTime | None:
        """The step of the fastest candidate."""
        return None if self.graded is None else self.graded.step

    @property
    def price_per_hour(self) -> float | None:
        """What an hour of all GPUs costs."""
        return None if self.price_of_one is None else self.price_of_one * self.gpus

    @property
    def hours(self) -> float | None:
        """How long the job takes."""
        return None if self.best is None else self._hours(self.best.seconds)

    @property
    def interval_hours(self) -> tuple[float, float] | None:
        """How long at least and at most."""
        if self.best is None:
            return None
        low, high = self.best.interval_seconds
        return self._hours(low), self._hours(high)

    def _hours(self, step_seconds: float) -> float:
        assert self.best is not None
        return self.samples / self.best.candidate.samples_per_step * step_seconds / _SECONDS_PER_HOUR

    @property
    def cost(self) -> float | None:
        """What the job costs; ``None`` without a price."""
        return None if self.hours is None or self.price_per_hour is None else self.hours * self.price_per_hour

    @property
    def interval_cost(self) -> tuple[float, float] | None:
        """What it costs at least and at most."""
        if self.interval_hours is None or self.price_per_hour is None:
            return None
        low, high = self.interval_hours
        return low * self.price_per_hour, high * self.price_per_hour

    @property
    def most_joules_per_sample(self) -> float | None:
        """Energy of a sample, if the boards drew all the power that they may."""
        if self.best is None or self.chip.rates is None:
            return None
        return self.gpus * self.chip.rates.power_watts / self.best.samples_per_second


def in_order(offers: Sequence[Offer]) -> list[Offer]:
    """Return offers with a price by cost, then those without by hours, then those that do not do."""

    def key(offer: Offer) -> tuple[int, float]:
        if offer.cost is not None:
            return 0, offer.cost
        return (1, offer.hours) if offer.hours is not None else (2, 0.0)

    return sorted(offers, key=key)


def rank(offer: Offer, offers: Sequence[Offer]) -> int | None:
    """Return one more than how many are surely cheaper: whose most is below this one's least.

    Offers whose intervals overlap thus share a rank. Hours count where no offer has a price; else those without one
    have no rank.
    """
    has_prices = any(o.interval_cost is not None for o in offers)
    own = offer.interval_cost if has_prices else offer.interval_hours
    if own is None:
        return None
    others = [o.interval_cost if has_prices else o.interval_hours for o in offers]
    return 1 + sum(other is not None and other[1] < own[0] for other in others)


def pareto_front(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers than which none is both as fast and as cheap, by what is predicted."""
    known = [(o, o.hours, o.cost) for o in offers if o.hours is not None and o.cost is not None]
    front = []
    for offer, hours, cost in known:
        beaten = any(h <= hours and c <= cost and (h, c) != (hours, cost) for _, h, c in known)
        if not beaten:
            front.append(offer)
    return front
