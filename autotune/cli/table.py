"""Print plain tables on stdout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import click

from autotune.cli.output import as_printed
from autotune.results.cells import table_lines


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print columns as wide as their widest cell; those headed as in ``right`` are right-aligned."""
    click.echo(as_printed("\n".join(table_lines(head, rows, right))))
