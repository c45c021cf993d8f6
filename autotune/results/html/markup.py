"""Render the templates of a page, with every text escaped."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from autotune import __version__
from autotune.core.units import format_bytes, format_next_run, format_rate, format_seconds, plural
from autotune.results.cells import batch_cell, peak_cell, speed_cell, took_cell
from autotune.results.wording import times

FOLDER = Path(__file__).with_name("templates")
_FORMATS = (format_bytes, format_rate, format_next_run, format_seconds, plural, times)
_CELLS = (batch_cell, peak_cell, speed_cell, took_cell)


def legible(text: str) -> str:
    """Escape control characters and lone surrogates, which HTML or UTF-8 cannot contain."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@functools.cache
def environment(*folders: Path) -> jinja2.Environment:
    """Return a Jinja environment for the templates of these folders and of this package."""
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
    made.globals["file"] = lambda name: Markup((FOLDER / name).read_text(encoding="utf-8"))
    made.filters.update({function.__name__.removeprefix("format_"): function for function in (*_FORMATS, *_CELLS)})
    made.filters["quote"] = shlex.quote
    return made


def _shown(value: Any) -> Any:
    """Return a value as escaped text; ``None`` as empty text."""
    if value is None:
        return ""
    return value if isinstance(value, Markup) else legible(str(value))
