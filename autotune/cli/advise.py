"""Compare GPUs to rent for a training job, from predictions alone (``autotune advise``)."""

from __future__ import annotations

from typing import Any

import click

from autotune.cli.options import SectionedCommand, options_given, table_options
from autotune.cli.output import as_printed, print_json, print_lines, terminal_columns


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
    server: str | None,
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
    has_batch = options["effective_batch"] is not None or options["effective_tokens"] is not None
    for hint, is_there in (("--model", options["model"] is not None), ("--effective-batch", has_batch)):
        if not is_there:
            raise click.MissingParameter(ctx=ctx, param_hint=hint, param_type="option")
    from autotune.cli.view import waiting

    with waiting(f"predicting {options['model']}"):
        if server is not None:
            from autotune.cli.remote import predict_remotely

            told = predict_remotely(server, "/v1/advise", options_given(ctx))
        else:
            from autotune.tuning.advising import advised

            told = advised(gpu, gpu_counts, gpu_spec, price, prices, samples, storage, options, terminal_columns())
    if as_json:
        print_json(told["advice"])
        return
    print_lines(told["lines"])
    for note in told["notes"]:
        click.echo(as_printed(note), err=True)
