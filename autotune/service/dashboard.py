"""Show the Optuna dashboard to those who have a token, beside the service's own pages."""

from __future__ import annotations

from typing import Any

from a2wsgi import WSGIMiddleware
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from autotune.core.errors import ServiceError
from autotune.results.dashboard import DashboardStorage, app_over
from autotune.service.access import access_of
from autotune.service.app import problem_response
from autotune.service.guard import DASHBOARD_PATHS
from autotune.store.repository import Store


class WithDashboard:
    """An ASGI application that hands the dashboard's paths on to it, and all others to the service."""

    def __init__(self, app: FastAPI, store: Store) -> None:
        self._app = app
        self._store = store
        self._dashboard: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request: the dashboard's paths by the dashboard, others by the service."""
        if scope["type"] != "http" or not scope["path"].startswith(DASHBOARD_PATHS):
            await self._app(scope, receive, send)
            return
        request = Request({**scope, "app": self._app})
        try:
            token = await access_of(request).identify(request)
        except ServiceError as error:
            await problem_response(error)(scope, receive, send)
            return
        if token is None:
            await RedirectResponse("/", 303)(scope, receive, send)
            return
        if self._dashboard is None:
            made: Any = await run_in_threadpool(lambda: app_over(DashboardStorage(self._store), way_back="/"))
            self._dashboard = WSGIMiddleware(made)
        # The guard has checked the name already; the dashboard knows those of this machine alone.
        headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        await self._dashboard({**scope, "headers": [*headers, (b"host", b"localhost")]}, receive, send)
