"""Run ``autotune models``: list the built-in catalog."""

from __future__ import annotations

import click

from autotune.cli.options import table_options
from autotune.cli.output import print_json, print_table


@click.command()
@table_options("models")
def models(as_json: bool) -> None:
    """List the built-in models, which need no download."""
    from autotune.core.units import format_count
    from autotune.models.catalog import entries
    from autotune.models.tasks import infer_task

    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "aliases": list(entry.aliases),
                    "parameters": entry.parameters,
                    "task": infer_task(entry.config),
                    "about": entry.about,
                }
                for entry in entries()
            ]
        )
        return
    rows = [(entry.name, format_count(entry.parameters), infer_task(entry.config), entry.about) for entry in entries()]
    print_table(("model", "parameters", "task", "about"), rows, right=("parameters",))
    click.echo("The part before a slash may be left out.", err=True)
    click.echo("A folder with a config.json or any model on the hub works as well.", err=True)
