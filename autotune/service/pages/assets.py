"""Serve the style sheets, the script and the icon of the pages."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from autotune.core.errors import ServiceError
from autotune.results.html.markup import FOLDER

router = APIRouter(include_in_schema=False)

_OWN = Path(__file__).parents[1] / "assets"
_ASSETS = {
    "report.css": (FOLDER, "text/css"),
    "page.css": (_OWN, "text/css"),
    "page.js": (_OWN, "text/javascript"),
    "icon.svg": (_OWN, "image/svg+xml"),
}


@router.get("/assets/{name}")
def asset(name: str) -> Response:
    """Return a file of the pages."""
    if name not in _ASSETS:
        raise ServiceError("there is no such file", "see the page", status=404)
    folder, kind = _ASSETS[name]
    return FileResponse(folder / name, media_type=kind, headers={"Cache-Control": "no-cache"})
