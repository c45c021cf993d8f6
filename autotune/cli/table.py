"""Print plain tables on stdout.

``rich.table`` would fold cells to 80 columns where stdout is no terminal, and takes 33 ms to import.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import click


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print columns as wide as their widest cell, two spaces apart; those headed as in ``right`` are right-aligned."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    for line in (head, *rows):
        cells = [
            cell.rjust(width) if title in right else cell.ljust(width)
            for cell, width, title in zip(line, widths, head, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())
