"""Say in text which GPUs to rent for a training job."""

from __future__ import annotations

from autotune.core.units import format_rate
from autotune.core.workload import Workload
from autotune.devices.prices import Prices
from autotune.estimate.advice import Offer, in_order, pareto_front, rank
from autotune.results.cells import table_lines
from autotune.results.prediction_text import unknown_line

_GRADES = {
    "measured": "in a study in --storage on that GPU",
    "scaled": "predicted from specified rates, times what a measurement in --storage says of the prediction",
    "predicted": "from specified rates, not measured",
}


def advice_lines(
    offers: list[Offer], workload: Workload, effective_batch: int, samples: float, prices: Prices
) -> list[str]:
    """Return the GPUs in the order in which they are to be chosen."""
    lines = [
        f"{workload.model} ({workload.task}, {workload.seq_len} tokens), effective batch {effective_batch}, "
        f"{samples:,.0f} samples; prices in {prices.unit} an hour ({prices.source})"
    ]
    front = pareto_front(offers)
    rows = []
    for offer in in_order(offers):
        if offer.best is None:
            rows.append(["", _name(offer), offer.why_not or "", *[""] * 7])
            continue
        low, high = offer.best.interval_samples_per_second
        assert offer.graded is not None
        assert offer.hours is not None
        cost = offer.interval_cost
        rows.append(
            [
                f"{rank(offer, offers) or ''}{' *' if offer in front else ''}",
                _name(offer),
                offer.best.candidate.describe(),
                format_rate(offer.best.samples_per_second),
                f"{format_rate(low)} to {format_rate(high)}",
                offer.graded.grade,
                offer.best.limited_by,
                format_rate(offer.hours),
                "" if offer.cost is None else format_rate(offer.cost),
                "" if cost is None else f"{format_rate(cost[0])} to {format_rate(cost[1])}",
            ]
        )
    head = ["rank", "GPU", "best", "samples/s", "interval", "grade", "limited by", "hours", "cost", "interval of cost"]
    lines += table_lines(head, rows)
    lines.append(
        "Cheapest first. * none is both as fast and as cheap. GPUs of one rank may cost the same: "
        "their intervals overlap."
    )
    steps = [offer.best for offer in offers if offer.best is not None and offer.best.unknown_operations]
    if steps:
        most = max(steps, key=lambda step: step.unknown_share)
        lines.append(unknown_line(most.unknown_operations, most.unknown_share))
    return lines


def _name(offer: Offer) -> str:
    return offer.chip.name if offer.gpus == 1 else f"{offer.gpus} × {offer.chip.name}"


def grade_lines(offers: list[Offer]) -> list[str]:
    """Return what each grade means that an offer has."""
    grades = dict.fromkeys(offer.graded.grade for offer in offers if offer.graded is not None)
    return [f"{grade}: {_GRADES[grade]}." for grade in grades]
