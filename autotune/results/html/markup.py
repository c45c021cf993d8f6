"""Build SVG elements from values, and make any text fit for a page."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

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
