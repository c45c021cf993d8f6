"""Build elements of a page from values, and render its templates, with every text escaped."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from autotune import __version__
from autotune.core.units import format_bytes, format_next_run, format_rate, format_seconds, plural
from autotune.results.cells import batch_cell, peak_cell, speed_cell, took_cell
from autotune.results.wording import times

FOLDER = Path(__file__).with_name("templates")
_FORMATS = (format_bytes, format_rate, format_next_run, format_seconds, plural, times)
_CELLS = (batch_cell, peak_cell, speed_cell, took_cell)

Child = str | None | Iterable["Child"]
"""What an element may contain: text, elements, nothing, or several of these."""


def legible(text: str) -> str:
    """Spell out control characters and lone surrogates: HTML forbids the former, no encoding can write the latter."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def element(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Build an element with its children in order, with every text escaped.

    ``class_`` stands for ``class``, any other ``_`` for ``-``. An attribute that is ``None`` is left out.
    """
    written = ""
    for key, value in attributes.items():
        text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        if value is not None:
            written += f' {key.rstrip("_").replace("_", "-")}="{escape(legible(text))}"'
    return Markup(f"<{name}{written}>{_content(children)}</{name}>")


def _content(child: Child) -> str:
    match child:
        case None:
            return ""
        case Markup():
            return child
        case str():
            return escape(legible(child))
    return "".join(map(_content, child))


@functools.cache
def environment(*folders: Path) -> jinja2.Environment:
    """Return an environment over the templates of these folders and of this package."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.globals["version"] = __version__
    made.globals["file"] = _file
    made.filters.update({function.__name__.removeprefix("format_"): function for function in (*_FORMATS, *_CELLS)})
    made.filters["quote"] = shlex.quote
    return made


def _shown(value: Any) -> Any:
    """Return a value as it is written; ``None`` is nothing."""
    if value is None:
        return ""
    return value if isinstance(value, Markup) else legible(str(value))


def _file(name: str) -> Markup:
    """Return a file beside the templates, as it is."""
    return Markup((FOLDER / name).read_text(encoding="utf-8"))
