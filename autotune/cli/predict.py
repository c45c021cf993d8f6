"""Run ``autotune predict`` and ``autotune advise``: print what fits on GPUs and which to rent, without any of them."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from autotune.cli.options import SectionedCommand, options_given, table_options
from autotune.cli.output import as_printed, print_json, print_lines, terminal_columns
from autotune.core.errors import NothingFitsError


@click.command(cls=SectionedCommand, short_help="Predict what fits on a GPU, and its speed.")
@table_options("predict")
@click.pass_context
def predict(
    ctx: click.Context,
    /,
    as_json: bool,
    all_batches: bool,
    anatomy: bool,
    fail_if_not_fit: bool,
    gpu: tuple[str, ...] | None,
    gpu_spec: str | None,
    storage: str,
    server: str | None,
    **options: Any,
) -> None:
    """Predict what fits on a GPU that is not at hand and how fast it trains, without running anything on one.

    Prints the fastest batch that fits for each configuration; --all and --json have every batch. What was predicted
    is kept beside the studies, so that the same is answered at once the next time.

    \b
      autotune predict --model bert-large-uncased --effective-batch 64 --gpu rtx-3090
      autotune predict --model gpt2-medium --seq-len 1024 --memory-limit 24GiB --anatomy
    """
    if options["model"] is None:
        raise click.MissingParameter(ctx=ctx, param_hint="--model", param_type="option")
    if server is not None:
        from autotune.cli.remote import predict_remotely

        predicted = predict_remotely(server, "/v1/predict", options_given(ctx))
    else:
        from autotune.cli.view import waiting
        from autotune.tuning.predictions import predicted_document

        with waiting(f"predicting {options['model']}"):
            predicted, problem = predicted_document(gpu, gpu_spec, storage, options)
        if problem is not None and ctx.get_parameter_source("storage") is not ParameterSource.DEFAULT:
            click.echo(f"autotune: what was predicted is not kept: {problem.message}", err=True)
    from autotune.results.predicted import read_gpu_document
    from autotune.results.prediction_text import accuracy_lines, prediction_lines

    gpus = [read_gpu_document(document) for document in predicted["gpus"]]
    unfit = [gpu.gpu for gpu in gpus if not any(arm.fitting for arm in gpu.arms)]
    # A configuration without predicted batches may fit.
    may_fit = any(arm.fitting or not arm.batches for gpu in gpus for arm in gpu.arms)
    succeeds = not unfit if fail_if_not_fit else may_fit
    if as_json:
        print_json(predicted)
        ctx.exit(0 if succeeds else NothingFitsError.exit_code)
    print_lines(prediction_lines(gpus, all_batches=all_batches, anatomy=anatomy, columns=terminal_columns()))
    click.echo("\n".join(accuracy_lines(gpus, options.get("optim") or ())), err=True)
    if not succeeds:
        raise NothingFitsError(
            f"no batch of {options['model']} is predicted to fit on {', '.join(dict.fromkeys(unfit))}",
            "give it more memory, or name a smaller model",
        )


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

    Speeds are predicted from the peak rates of data sheets. With studies in --storage they are measured speeds of that
    GPU, or predictions scaled by a measurement on another. GPUs whose intervals overlap share a rank. Give your own
    prices with --price; otherwise example prices of a dozen GPUs are used, each with its date. Nothing is fetched.

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
