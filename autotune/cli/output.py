"""Write the output of a command to a file or to stdout."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from autotune.core.errors import StorageError
from autotune.results.cells import table_lines


class FilePath(click.Path):
    """A path of a file or folder. Names that no file system accepts are refused, on which click itself would fail."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "\0" in str(value):
            self.fail("a file name cannot hold a null character", param, ctx)
        return super().convert(value, param, ctx)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; raises ``StorageError`` where that fails."""
    real = path.resolve()
    # What is no plain file, as a pipe, is written to.
    part = real if real.exists() and not real.is_file() else real.with_name(f".{real.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if part != real:
            part.replace(real)
    except OSError as error:
        if part != real:
            with suppress(OSError):
                part.unlink()
        raise StorageError(f"{path} cannot be written: {error.strerror}", "name another file") from error


def as_printed(text: object) -> str:
    """Return what others said without what a terminal would obey: all control characters but line breaks and tabs."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in str(text))


def print_json(document: Any) -> None:
    """Print one document on stdout."""
    click.echo(json.dumps(document, indent=2))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print columns as wide as their widest cell; those headed as in ``right`` are right-aligned."""
    click.echo(as_printed("\n".join(table_lines(head, rows, right))))
