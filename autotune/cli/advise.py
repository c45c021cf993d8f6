"""Compare GPUs to rent for a training job, from predictions alone (``autotune advise``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import SectionedCommand, table_options
from autotune.cli.output import print_json
from autotune.cli.predictions import (
    batches_of,
    known_chips,
    of_ranks,
    predictions,
    told_unknown,
)
from autotune.cli.table import print_table
from autotune.core.schema import encode
from autotune.core.units import format_bytes, format_rate

if TYPE_CHECKING:
    from autotune.core.candidate import Arm, Candidate
    from autotune.core.ceiling import Ceiling
    from autotune.core.workload import Workload
    from autotune.devices.gpus import Chip
    from autotune.devices.prices import Prices
    from autotune.estimate.advice import Offer
    from autotune.estimate.grades import Grades
    from autotune.estimate.memory import MemoryModel
    from autotune.estimate.step_time import StepTime
    from autotune.results.predicted import AdviceDocument, OfferDocument
    from autotune.tuning.prepare import Prepared

_PLENTY_BYTES = 2**42
"""Memory of the GPUs that stand for all of their kind: no candidate is left out for want of it."""


@click.command(cls=SectionedCommand, short_help="Compare GPUs for a training job: speed, hours, cost.")
@table_options("advise")
@click.pass_context
def advise(
    ctx: click.Context,
    /,
    as_json: bool,
    gpu: tuple[str, ...] | None,
    gpu_counts: tuple[int, ...],
    gpu_spec: str | None,
    price: tuple[str, ...] | None,
    prices: str | None,
    samples: float,
    storage: str,
    **options: Any,
) -> None:
    """Compare GPUs for a training job: what fits, how fast it is, hours and cost. Nothing is run on a GPU.

    Speeds are predicted from specified rates, or known from the studies in --storage: measured on that GPU, or scaled
    by a measurement on another. GPUs whose intervals overlap share a rank. Prices are your own; without any there are a
    dozen dated examples. Nothing is fetched.

    \b
      autotune advise --model gpt2-medium --effective-batch 64 --samples 1e6
      autotune advise --model gpt2-medium --effective-batch 64 --gpu l4,h100 --price l4=0.7,h100=2.95
      autotune advise --model gpt2-medium --effective-batch 64 --gpu h100 --gpus 1,2,4
    """
    for name in ("model", "effective_batch"):
        if options[name] is None:
            hint = "--" + name.replace("_", "-")
            raise click.MissingParameter(ctx=ctx, param_hint=hint, param_type="option")
    from autotune.devices.gpus import ALIASES, find_chip
    from autotune.devices.prices import read_prices
    from autotune.estimate.grades import Grades
    from autotune.space.space import Batches
    from autotune.tuning.answer_cache import AnswersBeside
    from autotune.tuning.measured import measured_pools

    for count in gpu_counts:
        # Raises where the effective batch cannot be shared.
        Batches(options["effective_batch"], count)
    known = known_chips(gpu_spec)
    chips = list(known.values()) if gpu in (None, ("all",)) else [find_chip(name, known) for name in gpu or ()]
    aliases = {alias: name for alias, name in ALIASES.items() if name in known}
    paid = read_prices(price or (), prices, {**{name: name for name in known}, **aliases})
    with AnswersBeside(storage) as answers:
        prepared, models = _models(chips, options, answers, gpu_counts)
    workload = prepared.request.workload
    grades = Grades(
        measured_pools(storage, workload),
        lambda arm, chip: model.operations(arm) if (model := _model_of(arm, chip, models)) else None,
    )
    job = _Job(prepared, models, grades, samples)
    offers = [_offer(chip, count, job, paid.of.get(chip.name)) for chip in chips for count in gpu_counts]
    if as_json:
        print_json(encode(_document(offers, workload, samples, paid)))
    else:
        _print(offers, workload, options["effective_batch"], samples, paid)


@dataclass(frozen=True)
class _Job:
    """What is trained, and all that is known of its memory and speed."""

    prepared: Prepared
    models: dict[bool, MemoryModel]
    grades: Grades
    samples: float


def _models(
    chips: list[Chip], options: dict[str, Any], answers: Any, counts: tuple[int, ...]
) -> tuple[Prepared, dict[bool, MemoryModel]]:
    """Predict memory and work for GPUs with flash attention, and for those without, which have no bf16 either.

    Two stand for all: the workspaces of cuBLAS, at most 48 MiB apart, and the scratch of reductions are those of an
    H200.
    """
    from autotune.devices.gpus import CHIPS

    kinds = sorted({chip.has_flash_attention for chip in chips}, reverse=True)
    stand_ins = {True: CHIPS["h200"], False: CHIPS["v100-32gb"]}
    wanted = options["precision"]
    if wanted is not None:
        # GPUs of a kind that has none of these precisions are told so later.
        kinds = [kind for kind in kinds if set(wanted) & set(stand_ins[kind].precisions)] or kinds
    only = {kind: _among(wanted, stand_ins[kind].precisions) for kind in kinds}
    if len(kinds) == 2:
        # No kind of attention makes a difference to float32, of which both would say the same.
        only[False] = _among(only[False], ("fp16",)) if wanted else ("fp16",)
    targets = [(replace(stand_ins[kind], memory_bytes=_PLENTY_BYTES), _PLENTY_BYTES) for kind in kinds]
    asked = [{**options, "memory_limit": None, "world_size": 1, "precision": only[kind]} for kind in kinds]
    found = predictions(targets, asked, answers, counts)
    return found[0][0], {kind: model for kind, (_, model) in zip(kinds, found, strict=True)}


def _among(wanted: tuple[str, ...] | None, precisions: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the wanted precisions that a GPU has; all of them where it has none, which is refused later."""
    if wanted is None:
        return None
    return tuple(precision for precision in wanted if precision in precisions) or wanted


def _offer(chip: Chip, count: int, job: _Job, price: float | None) -> Offer:
    """Return the best that so many GPUs of a kind do."""
    from autotune.core.ceiling import Ceiling
    from autotune.devices.gpus import TYPICAL_CONTEXT_BYTES
    from autotune.estimate.advice import Offer

    def refused(why: str) -> Offer:
        return Offer(chip, None, why, job.samples, price, count)

    if chip.rates is None or chip.memory_bytes is None:
        return refused("its rates are not published")
    if count > 1 and chip.rates.link is None:
        return refused("several in one host are not predicted")
    ceiling = Ceiling(None, chip.memory_bytes, TYPICAL_CONTEXT_BYTES, job.prepared.request.headroom)
    known, least = _fitting_steps(chip, count, job, ceiling)
    if known:
        graded = [job.grades.graded(chip, step) for step in known]
        # What was measured here is better known than a prediction that promises a little more.
        best = [each for each in graded if each.grade == "measured"] or graded
        return Offer(chip, min(best, key=lambda each: each.step.seconds), None, job.samples, price, count)
    if least is None:
        return refused("nothing is predicted for it")
    return refused(f"the smallest candidate needs {format_bytes(least)} of {format_bytes(ceiling.line_bytes)}")


def _fitting_steps(chip: Chip, count: int, job: _Job, ceiling: Ceiling) -> tuple[list[StepTime], int | None]:
    """Return the predicted steps of all candidates that fit, and the least memory of those that do not."""
    from autotune.core.candidate import Candidate
    from autotune.core.ceiling import PREDICTION_MARGIN
    from autotune.estimate.step_time import StepTimeModel

    speeds, space = StepTimeModel(chip), of_ranks(job.prepared.space, count)
    known: list[StepTime] = []
    least: int | None = None
    for arm in space.arms:
        model = _model_of(arm, chip, job.models)
        operations = model.operations(arm) if model is not None else None
        if model is None or operations is None or arm.precision not in chip.precisions:
            continue
        for batch in batches_of(space):
            candidate = Candidate(arm, batch, space.batches.accumulation(batch))
            predicted = model.prediction(candidate)
            if predicted is None:
                continue
            # DDP holds every gradient a second time, in its buckets. A search keeps it from a third copy where that
            # would matter, see autotune.tuning.strategies.
            needed = predicted.peak_reserved_bytes + (operations.gradient_bytes if count > 1 else 0)
            least = min(needed, least or needed)
            if ceiling.bounds.fits(needed, margin=PREDICTION_MARGIN):
                known.append(speeds.predict(operations, _of_ranks(candidate, count)))
    return known, least


def _of_ranks(candidate: Candidate, count: int) -> Candidate:
    if count == 1:
        return candidate
    return replace(candidate, arm=replace(candidate.arm, strategy="ddp", ranks=count))


def _model_of(arm: Arm, chip: Chip, models: dict[bool, MemoryModel]) -> MemoryModel | None:
    """Return the predictions for the GPU's kind; in float32 those of either kind: flash attention has 16 bits only."""
    if arm.precision in ("fp16", "bf16"):
        return models.get(chip.has_flash_attention)
    return models.get(True) or models.get(False)


def _document(offers: list[Offer], workload: Workload, samples: float, prices: Prices) -> AdviceDocument:
    from autotune.estimate.advice import in_order, pareto_front, rank
    from autotune.results.predicted import AdviceDocument, PricesDocument

    front = pareto_front(offers)
    return AdviceDocument(
        predicted=True,
        workload={name: value for name, value in workload.document().items() if name != "config"},
        samples=samples,
        prices=PricesDocument(prices.unit, prices.source),
        gpus=[_row(offer, workload, rank(offer, offers), offer in front) for offer in in_order(offers)],
    )


def _row(offer: Offer, workload: Workload, place: int | None, is_on_front: bool) -> OfferDocument:
    from autotune.devices.gpus import CHECKED_AGAINST
    from autotune.results.predicted import FittingOfferDocument, OfferDocument, speed_document

    rates = offer.chip.rates
    row = OfferDocument(
        gpu=offer.chip.name,
        gpus=offer.gpus,
        fits=offer.best is not None,
        why_not=offer.why_not,
        grade=offer.graded.grade if offer.graded is not None else None,
        rank=place,
        is_on_pareto_front=is_on_front,
        hours=offer.hours,
        hours_interval=offer.interval_hours,
        price_per_hour=offer.price_per_hour,
        cost=offer.cost,
        cost_interval=offer.interval_cost,
        samples_per_currency_unit=offer.samples / offer.cost if offer.cost else None,
        joules_per_sample=offer.graded.joules_per_sample if offer.graded is not None else None,
        most_joules_per_sample=offer.most_joules_per_sample,
        rates_source=rates.source if rates is not None else None,
        rates_checked_against=CHECKED_AGAINST.get(offer.chip.name) if rates is not None else None,
    )
    if offer.best is None:
        return row
    speed = speed_document(offer.best, workload)
    return FittingOfferDocument(**vars(row), **vars(speed), candidate=offer.best.candidate.parameters())


def _print(offers: list[Offer], workload: Workload, effective_batch: int, samples: float, prices: Prices) -> None:
    from autotune.estimate.advice import in_order, pareto_front, rank

    click.echo(
        f"{workload.model} ({workload.task}, {workload.seq_len} tokens), effective batch {effective_batch}, "
        f"{samples:,.0f} samples; prices in {prices.unit} an hour ({prices.source})"
    )
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
    print_table(head, rows)
    click.echo(
        "Cheapest first. * none is both as fast and as cheap. GPUs of one rank may cost the same: "
        "their intervals overlap."
    )
    steps = [offer.best for offer in offers if offer.best is not None and offer.best.unknown_operations]
    if steps:
        most = max(steps, key=lambda step: step.unknown_share)
        click.echo(told_unknown(most.unknown_operations, most.unknown_share))
    told = {
        "measured": "in a study in --storage on that GPU",
        "scaled": "predicted from specified rates, times what a measurement in --storage says of the prediction",
        "predicted": "from specified rates, not measured",
    }
    for grade in dict.fromkeys(offer.graded.grade for offer in offers if offer.graded is not None):
        click.echo(f"{grade}: {told[grade]}.", err=True)


def _name(offer: Offer) -> str:
    return offer.chip.name if offer.gpus == 1 else f"{offer.gpus} × {offer.chip.name}"
