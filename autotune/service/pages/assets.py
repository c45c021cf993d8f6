"""Serve the style sheets, the script and the icon of the pages."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import Response

from autotune.core.errors import ServiceError
from autotune.results.html.style import STYLE

router = APIRouter(include_in_schema=False)


def _read(name: str) -> str:
    return importlib.resources.files("autotune.service").joinpath("assets", name).read_text(encoding="utf-8")


_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4" fill="#1f5fc4"/>'
    '<path d="M3 12 7 6l3 3 3-5" fill="none" stroke="#fff" stroke-width="2"/></svg>'
)
_ASSETS: dict[str, tuple[str, Callable[[], str]]] = {
    "report.css": ("text/css", lambda: STYLE),
    "page.css": ("text/css", lambda: _read("page.css")),
    "page.js": ("text/javascript", lambda: _read("page.js")),
    "icon.svg": ("image/svg+xml", lambda: _ICON),
}


@router.get("/assets/{name}")
def asset(name: str) -> Response:
    """Return a file of the pages."""
    if name not in _ASSETS:
        raise ServiceError("there is no such file", "see the page", status=404)
    kind, read = _ASSETS[name]
    return Response(read(), media_type=kind, headers={"Cache-Control": "no-cache"})
