"""Compare GPUs to rent for a training job, from predictions alone (``autotune advise``)."""

from __future__ import annotations

from typing import Any

import click

from autotune.cli.options import SectionedCommand, table_options
from autotune.cli.output import print_json


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
    from autotune.cli.view import waiting
    from autotune.core.schema import encode
    from autotune.devices.gpus import ALIASES, find_chip
    from autotune.devices.prices import read_prices
    from autotune.estimate.grades import Grades
    from autotune.results.advice_text import advice_lines, grade_lines
    from autotune.results.predicted import advice_document
    from autotune.space.space import Batches
    from autotune.tuning.answer_cache import AnswersBeside
    from autotune.tuning.measured import measured_pools
    from autotune.tuning.offers import Job, best_offer, model_of, models_of
    from autotune.tuning.predictions import known_chips

    for count in gpu_counts:
        # Raises where the effective batch cannot be shared.
        Batches(options["effective_batch"], count)
    known = known_chips(gpu_spec)
    chips = list(known.values()) if gpu in (None, ("all",)) else [find_chip(name, known) for name in gpu or ()]
    aliases = {alias: name for alias, name in ALIASES.items() if name in known}
    paid = read_prices(price or (), prices, {**{name: name for name in known}, **aliases})
    with (
        waiting(f"predicting {options['model']}"),
        AnswersBeside(storage) as answers,
    ):
        prepared, models = models_of(chips, options, answers, gpu_counts)
    workload = prepared.request.workload
    grades = Grades(
        measured_pools(storage, workload),
        lambda arm, chip: model.operations(arm) if (model := model_of(arm, chip, models)) else None,
    )
    job = Job(prepared, models, grades, samples)
    offers = [best_offer(chip, count, job, paid.of.get(chip.name)) for chip in chips for count in gpu_counts]
    if as_json:
        print_json(encode(advice_document(offers, workload, samples, paid)))
    else:
        lines = advice_lines(offers, workload, options["effective_batch"], samples, paid)
        click.echo("\n".join(lines))
        for line in grade_lines(offers):
            click.echo(line, err=True)
