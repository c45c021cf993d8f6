"""Make HTML and SVG from values, so that every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Markup(str):
    """Text that is HTML already; any other text is escaped before it becomes part of a page."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]
"""What an element may contain: text, elements, nothing, or several of these."""


def escaped(text: str) -> str:
    """Escape text for HTML, in attributes as well. Control characters and lone surrogates are spelled out.

    No encoding can write a surrogate, and HTML forbids control characters.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return html.escape(text)


def element(name: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Return an element with its children in order.

    ``class_`` stands for ``class``, another ``_`` for ``-``. An attribute that is ``None`` or ``False`` is left out.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Return children one after the other, each escaped unless it is markup."""
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
