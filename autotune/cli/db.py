"""Run ``autotune db`` and ``autotune dashboard``: upgrade the database of studies, and show it in a browser."""

from __future__ import annotations

import click

from autotune.cli.options import table_options


@click.group(short_help="Show or upgrade the database.", invoke_without_command=True)
@click.pass_context
def db(ctx: click.Context) -> None:
    """Show or upgrade the schema of the database."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@db.command()
@table_options("db")
def current(storage: str) -> None:
    """Print the schema's revision and the newest one."""
    from autotune.store.opening import current_revision

    revision, head = current_revision(storage)
    click.echo(f"{revision or 'none'} (newest: {head})")


@db.command()
@table_options("db")
def upgrade(storage: str) -> None:
    """Upgrade the schema to the newest revision; a missing file is created."""
    from autotune.store import opening

    before, after = opening.upgrade(storage)
    click.echo(f"{after}, as before" if before == after else f"{before or 'none'} -> {after}")


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
