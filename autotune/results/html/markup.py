"""Build HTML and SVG elements from values, with every text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Markup(str):
    """Text that is HTML already. Any other text is escaped before it becomes part of a page."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]
"""What an element may contain: text, elements, nothing, or several of these."""


def escaped(text: str) -> str:
    """Escape text for HTML and its attributes. Control characters and lone surrogates are spelled out.

    HTML forbids control characters, and no encoding can write a surrogate.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return html.escape(text)


def element(name: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Build an element with its children in order.

    ``class_`` stands for ``class``, any other ``_`` for ``-``. An attribute that is ``None`` or ``False`` is left out.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Join children, each escaped unless it is markup."""
    return Markup("".join(map(_content, children)))


def _content(child: Child) -> str:
    match child:
        case None:
            return ""
        case Markup():
            return child
        case str() | int():
            return escaped(str(child))
    return joined(child)


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {key}="{escaped(text)}"'
