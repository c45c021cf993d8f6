"""Run ``autotune db``: show and upgrade the revision of the database's schema."""

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
