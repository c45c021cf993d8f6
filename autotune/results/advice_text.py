"""Say in text which GPUs to rent for a training job."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.units import format_rate
from autotune.core.workload import Workload
from autotune.devices.prices import Prices
from autotune.estimate.advice import Offer, in_order, pareto_front, rank
from autotune.results.cells import table_lines
from autotune.results.prediction_text import few_bits_lines, unknown_line

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
        f"{workload.model} ({workload.task}, {workload.seq_len} tokens); {workload.describe_numerics()}; "
        f"effective batch {effective_batch}, {samples:,.0f} samples; prices in {prices.unit} an hour ({prices.source})"
    ]
    front, ordered = pareto_front(offers), in_order(offers)
    has_prices = any(offer.cost is not None for offer in offers)
    grades = {offer.graded.grade for offer in offers if offer.graded is not None}
    head = ["GPU", "best", "samples/s", "hours", *(["cost"] if has_prices else [])]
    rows, refused = [], []
    for offer in ordered:
        name = f"{'* ' if offer in front else '  ' if has_prices else ''}{_name(offer)}"
        if offer.best is None or offer.hours is None or offer.graded is None:
            refused.append((name, offer.why_not or ""))
            continue
        speed = _with_ends(offer.best.samples_per_second, offer.best.interval_samples_per_second)
        grade_text = "" if len(grades) == 1 else f" {offer.graded.grade}"
        cost = "" if offer.cost is None or offer.interval_cost is None else _with_ends(offer.cost, offer.interval_cost)
        row = [name, offer.best.candidate.describe(), f"{speed}{grade_text}", format_rate(offer.hours), cost]
        rows.append(row[: len(head)])
    lines += table_lines(head, rows)
    # Outside the table, whose second column such a sentence would widen beyond 80 characters.
    width = max((len(name) for name, *_ in (*rows, *refused)), default=0)
    lines += [f"{name:<{width}}  {why}" for name, why in refused]
    lines.append(_undecided(ordered) + (" * none is both as fast and as cheap." if front else ""))
    steps = [offer.best for offer in offers if offer.best is not None and offer.best.unknown_operations]
    if steps:
        most = max(steps, key=lambda step: step.unknown_share)
        lines.append(unknown_line(most.unknown_operations, most.unknown_share))
    return lines


def _with_ends(value: float, interval: tuple[float, float]) -> str:
    """Return ``67.3 (42.0–108.6)``."""
    low, high = map(format_rate, interval)
    return f"{format_rate(value)} ({low}–{high})"


def _undecided(ordered: list[Offer]) -> str:
    """Say by what the GPUs are sorted, and which of them may be the first although they are not."""
    best = "cheapest" if any(offer.cost is not None for offer in ordered) else "fastest"
    ranked = [(rank(offer, ordered), _name(offer)) for offer in ordered]
    tied, behind = ([name for number, name in ranked if number and (number > 1) is late] for late in (False, True))
    line = f"{best.capitalize()} first, by what is predicted"
    if len(tied) < 2:
        return f"{line}."
    which = f"all but {', '.join(behind)}" if 0 < len(behind) < len(tied) else ", ".join(tied) if behind else "all"
    return f"{line}. The intervals overlap: {which} may be the {best}."


def _name(offer: Offer) -> str:
    return offer.chip.name if offer.gpus == 1 else f"{offer.gpus} × {offer.chip.name}"


def grade_lines(offers: list[Offer], quantize: str | None = None, optims: Sequence[str] = ()) -> list[str]:
    """Return what each grade means that an offer has, and how good predictions of few bits are."""
    grades = dict.fromkeys(offer.graded.grade for offer in offers if offer.graded is not None)
    few_bits = few_bits_lines(quantize, optims, has_speed=bool(grades.keys() - {"measured"}))
    return [*(f"{grade}: {_GRADES[grade]}." for grade in grades), *few_bits]
