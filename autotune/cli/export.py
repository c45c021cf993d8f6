"""Run ``autotune export``: print the best trial as ``TrainingArguments``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import service_of, study_argument, table_options
from autotune.cli.output import FilePath, as_printed, write_text

if TYPE_CHECKING:
    from autotune.results.recipes import AnyForm


@click.command(short_help="Export the best trial as settings.")
@study_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(
        (
            "json",
            "yaml",
            "cli",
            "python",
            "env",
            "torchrun",
            "accelerate",
            "trl",
            "axolotl",
            "llama-factory",
            "model-card",
        )
    ),
    default="json",
    show_default=True,
)
@click.option("--output", "-o", type=FilePath(dir_okay=False, path_type=Path), help="Write to a file, not stdout.")
@click.option("--anyway", is_flag=True, help="Use the leader even if noise hides the fastest candidate.")
@table_options("export")
@click.pass_context
def export(
    ctx: click.Context,
    /,
    study: str,
    form: AnyForm,
    output: Path | None,
    anyway: bool,
    storage: str,
    server: str | None,
) -> None:
    """Export the best trial as TrainingArguments, as another trainer's configuration, or for a model card.

    \b
      autotune export STUDY > training_arguments.json
      autotune export STUDY --format cli
      autotune export STUDY --format torchrun
      autotune export STUDY --format axolotl > axolotl.yaml
      env $(autotune export STUDY --format env) python train.py $(autotune export STUDY --format cli)
    """
    from autotune.results.recipes import exported_text
    from autotune.results.report import load_report
    from autotune.store.opening import open_store

    if (service := service_of(ctx)) is not None:
        from autotune.service.client import Client, path_of

        text, headers = Client(service).fetch(f"{path_of(study)}/export", {"format": form, "anyway": anyway})
        notes = [note for note in headers.get("autotune-note", "").split(" | ") if note]
    else:
        with open_store(storage, create=False) as store:
            report = load_report(store, study)
        if not anyway:
            report.check_is_told()
        text, notes = exported_text(report, form)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
    if form == "env" and not text.strip():
        click.echo("nothing is printed: the winner needs no environment variable", err=True)
    for line in notes:
        click.echo(as_printed(line), err=True)
