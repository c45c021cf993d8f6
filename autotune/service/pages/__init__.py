"""Serve the pages that a browser shows: rendered here, kept current by events, with nothing from another host."""

from __future__ import annotations

from typing import cast

from fastapi import FastAPI

from autotune.service.pages import compare, frame, home, search
from autotune.service.pages.frame import Rendered
from autotune.service.searches import Searches


def add_pages(app: FastAPI) -> None:
    """Add the pages to the application, and show its errors to browsers as pages."""
    app.state.rendered = Rendered(cast("Searches", app.state.searches).changes)
    for module in (frame, home, search, compare):
        app.include_router(module.router)
    frame.show_errors_as_pages(app)
