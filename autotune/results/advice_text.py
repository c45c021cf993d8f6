"""Say in text which GPUs to rent for a training job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.units import format_rate
from autotune.core.workload import Workload
from autotune.devices.prices import Prices
from autotune.estimate.advice import Offer, in_order, pareto_front, rank
from autotune.estimate.step_time import StepTime
from autotune.results.cells import narrow_table_lines
from autotune.results.prediction_text import few_bits_lines, unknown_line

_GRADES = {
    "measured": "in a study in --storage on that GPU",
    "scaled": "predicted from specified rates, times what a measurement in --storage says of the prediction",
    "predicted": "from specified rates, not measured",
}


def advice_lines(
    offers: list[Offer],
    workload: Workload,
    effective_batch: int,
    samples: float,
    prices: Prices,
    columns: int | None = None,
) -> list[str]:
    """Return the GPUs in the order in which they are to be chosen, in a table of so many columns."""
    lines = [
        f"{workload.model} ({workload.task}, {workload.seq_len} tokens); {workload.describe_numerics()}; "
        f"effective batch {effective_batch}, {samples:,.0f} samples; prices in {prices.unit} an hour ({prices.source})"
    ]
    front, ordered = pareto_front(offers), in_order(offers)
    has_prices = any(offer.cost is not None for offer in offers)
    grades = {offer.graded.grade for offer in offers if offer.graded is not None}
    head = ["GPU", "best", "samples/s", "hours", *(["cost"] if has_prices else [])]
    rows: list[tuple[list[str], Offer]] = []
    refused: list[tuple[str, str]] = []
    for offer in ordered:
        name = f"{'* ' if offer in front else '  ' if has_prices else ''}{_name(offer)}"
        if offer.best is None or offer.hours is None or offer.graded is None:
            refused.append((name, offer.why_not or ""))
            continue
        speed = _with_ends(offer.best.samples_per_second, offer.best.interval_samples_per_second)
        known = "" if len(grades) == 1 else f" ({offer.graded.grade})"
        row = [name, f"{_candidate(offer.best).describe()}{known}", speed, format_rate(offer.hours)]
        rows.append((row, offer))

    def table(*, with_ends: bool) -> list[str]:
        cells = [[*row, _cost(offer, with_ends=with_ends)][: len(head)] for row, offer in rows]
        return narrow_table_lines(head, cells, columns, (), folds=1)

    shown = table(with_ends=True)
    # The ends of a cost say no more than those of the speed.
    lines += shown if columns is None or max(map(len, shown)) <= columns else table(with_ends=False)
    # Outside the table, whose second column such a sentence would widen beyond 80 characters.
    width = max((len(name) for name in (*(row[0] for row, _ in rows), *(name for name, _ in refused))), default=0)
    lines += [f"{name:<{width}}  {why}" for name, why in refused]
    lines.append(_undecided(ordered) + (" * none is both as fast and as cheap." if front else ""))
    steps = [offer.best for offer in offers if offer.best is not None and offer.best.unknown_operations]
    if steps:
        most = max(steps, key=lambda step: step.unknown_share)
        lines.append(unknown_line(most.unknown_operations, most.unknown_share))
    return lines


def _candidate(step: StepTime) -> Candidate:
    """Return a candidate without its ranks, which the number of GPUs says."""
    return replace(step.candidate, arm=replace(step.candidate.arm, strategy=None, ranks=1))


def _cost(offer: Offer, *, with_ends: bool) -> str:
    if offer.cost is None or offer.interval_cost is None:
        return ""
    return _with_ends(offer.cost, offer.interval_cost) if with_ends else format_rate(offer.cost)


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
