"""Write the output of a command to a file or to stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
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
    """Write a file atomically. Raises ``StorageError`` where that fails."""
    real = path.resolve()
    # A pipe or another special file is written to directly, not replaced.
    written = real if real.exists() and not real.is_file() else real.with_name(f".{real.name}.part")
    try:
        written.write_text(text, encoding="utf-8")
        if written != real:
            written.replace(real)
    except OSError as error:
        if written != real:
            with suppress(OSError):
                written.unlink()
        raise StorageError(f"{path} cannot be written: {error.strerror}", "name another file") from error


def as_printed(text: object) -> str:
    """Return foreign text without control characters that a terminal would obey, except line breaks and tabs."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in str(text))


# Between a number and what is in parentheses after it: ``67.0 (41.5–107.3)``.
_KEPT_TOGETHER = re.compile(r"(?<=\d) (?=\()")


def wrapped(text: str, columns: int) -> str:
    """Return text with its lines wrapped between words to ``columns``; continuation lines are indented by four more.

    A number and its interval stay on one line, and so does a word that is longer than a line.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= columns:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        # ``wrap`` does not break lines at a null character, which is a space again at the end.
        glued = _KEPT_TOGETHER.sub("\0", line)
        lines += wrap(glued, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def terminal_columns() -> int | None:
    """Return the width of the terminal; ``None`` where stdout is not a terminal."""
    # Python has no stdout where it was closed before the start.
    return get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout, wrapped to the width of a terminal."""
    text, columns = as_printed("\n".join(lines)), terminal_columns()
    click.echo(text if columns is None else wrapped(text, columns))


def print_json(document: Any) -> None:
    """Print a document as indented JSON on stdout."""
    click.echo(json.dumps(document, indent=2))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print a table with columns as wide as their widest cell; those titled as in ``right`` are right-aligned."""
    print_lines(table_lines(head, rows, right))
