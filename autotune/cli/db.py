"""Run ``autotune db``: show and upgrade the revision of the database's schema, copy studies to another one."""

from __future__ import annotations

import click

from autotune.cli.options import table_options
from autotune.core.units import plural


@click.group(short_help="Show, upgrade or copy the database.", invoke_without_command=True)
@click.pass_context
def db(ctx: click.Context) -> None:
    """Show or upgrade the schema of the database, or copy studies to another one."""
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


@db.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--study", "names", multiple=True, metavar="NAME", help="Copy this study alone; may be repeated.")
def copy(source: str, target: str, names: tuple[str, ...]) -> None:
    """Copy studies from one database to another.

    FROM and TO are SQLite files or SQLAlchemy URLs. TO is created where it is missing. A study is copied with its
    trials and with what a service recorded of it; all of them arrive, or none.
    """
    from autotune.store.location import shown_location
    from autotune.store.transfer import copy_studies

    copied = copy_studies(source, target, names)
    for name in copied.studies:
        click.echo(name)
    studies = f"{len(copied.studies)} {'study' if len(copied.studies) == 1 else 'studies'}"
    words = [f"{studies} with {plural(copied.trials, 'trial')}"]
    words += [f"the record of {copied.jobs} ended searches of a service"] if copied.jobs else []
    click.echo(f"copied {' and '.join(words)} to {shown_location(target)}", err=True)
    if copied.jobs_left:
        click.echo(f"{copied.jobs_left} searches that wait or run stay with their service", err=True)
