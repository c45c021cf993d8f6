"""Run ``autotune dashboard``: serve the Optuna dashboard, read-only."""

from __future__ import annotations

import click

from autotune.cli.options import table_options


@click.command(short_help="Serve the Optuna dashboard on this machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@table_options("dashboard")
def dashboard(port: int, storage: str) -> None:
    """Serve the Optuna dashboard over the studies, read-only, on 127.0.0.1."""
    from autotune.results.dashboard import serve

    def say(url: str) -> None:
        click.echo("the dashboard, read-only (its buttons change nothing); Ctrl-C ends it", err=True)
        click.echo("its best trial is one process; autotune show tells the mean over all that measured it", err=True)
        # Alone on its line, so that a terminal links nothing else.
        click.echo(url, err=True)

    serve(storage, port=port, ready=say)
