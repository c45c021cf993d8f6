"""Put the HTTP API together: routes, access rules, errors as problem documents, guard, Optuna's dashboard beside it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from a2wsgi import WSGIMiddleware
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from autotune import __version__
from autotune.core.errors import AutotuneError, InvalidRequestError, ServiceError
from autotune.results.dashboard import DashboardStorage, app_over
from autotune.service.access import DASHBOARD_PATHS, Access, Guard, access_of
from autotune.service.feeds import Feeds
from autotune.service.openapi import describe_api
from autotune.service.predictions import Predict, Predictions
from autotune.service.problems import MEDIA_TYPE, problem_document
from autotune.service.routes import Health, router
from autotune.service.searches import Searches
from autotune.store.repository import Store


def problem_response(error: AutotuneError) -> JSONResponse:
    """Return the answer for an error."""
    status, document = problem_document(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(document, status, headers=headers, media_type=MEDIA_TYPE)


def _on_error(request: Request, error: Exception) -> JSONResponse:
    """Return the problem document for an error of any kind."""
    match error:
        case AutotuneError():
            told = error
        case RequestValidationError():
            first = error.errors()[0]
            # Where a field has a union type, pydantic names the refusing member with brackets.
            places = (str(part) for part in first["loc"] if part not in ("body", "query", "path", "header"))
            where = ".".join(part for part in places if "[" not in part)
            told = InvalidRequestError(f"{where or 'the request'}: {first['msg']}"[:300], "see /openapi.json")
            if first["type"] == "json_invalid":
                told = InvalidRequestError("the body is not JSON", "send a JSON object")
        case HTTPException(status_code=404):
            told = ServiceError(f"there is nothing at {request.url.path[:200]}", "see /openapi.json", status=404)
        case HTTPException():
            told = ServiceError(str(error.detail), status=error.status_code)
        case _:
            told = ServiceError("the service failed; its log says why", status=500)
    return problem_response(told)


def make_app(
    searches: Searches,
    *,
    names: Collection[str] = (),
    extend: Callable[[FastAPI], None] | None = None,
    around: Callable[[FastAPI], ASGIApp] | None = None,
    predict: Predict | None = None,
) -> Guard:
    """Return the application over these searches.

    ``names`` are its additional host names. ``extend`` adds routes, ``around`` wraps the application. ``predict``
    answers predictions; without it they are refused.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        searches.changes.attach()
        await run_in_threadpool(searches.runner.begin)
        yield
        searches.is_closing = True
        await run_in_threadpool(searches.runner.close)

    app = FastAPI(
        title="autotune",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # Names of a generated client: searches_submit.
        generate_unique_id_function=lambda route: "_".join([*map(str, route.tags), route.name]),
    )
    app.openapi = functools.cache(lambda: describe_api(app))  # type: ignore[method-assign]
    app.state.searches = searches
    app.state.predictions = Predictions(predict, searches.data_folders)
    app.state.health = Health(searches)
    app.state.access = Access(searches)
    app.state.feeds = Feeds(searches, app.state.access)
    for kind in (AutotuneError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.include_router(router)
    if extend is not None:
        extend(app)
    return Guard(app, names, around=around)


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
        # The guard has checked the host name already; the dashboard accepts only names of this machine.
        headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        await self._dashboard({**scope, "headers": [*headers, (b"host", b"localhost")]}, receive, send)
