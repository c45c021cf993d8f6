"""Put the service's application together: API, pages, access rules, errors, guard, Optuna's dashboard."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Collection
from typing import Any

from a2wsgi import WSGIMiddleware
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from autotune import __version__
from autotune.core.errors import AutotuneError, InvalidRequestError, ServiceError
from autotune.results.dashboard import DashboardStorage, app_over
from autotune.service.access import DASHBOARD_PATHS, Access, Guard, access_of
from autotune.service.feeds import Feeds
from autotune.service.openapi import describe_api
from autotune.service.pages import compare, frame, home, search
from autotune.service.problems import MEDIA_TYPE, problem_document
from autotune.service.routes import Health
from autotune.service.routes import router as api
from autotune.service.searches import Searches
from autotune.store.repository import Store

_NO_JSON = ("the body is not JSON", "send a JSON object")


def _on_error(request: Request, error: Exception) -> Response:
    """Return the response for an error of any kind: a page where a browser asks for one, else a problem document."""
    is_of_page = not request.url.path.startswith(("/v1/", "/parts/", "/assets/"))
    is_page = is_of_page and "text/html" in request.headers.get("accept", "")
    match error:
        case AutotuneError():
            told = error
        case RequestValidationError():
            first = error.errors()[0]
            # Where a field has a union type, pydantic names the refusing member with brackets.
            where = ".".join(part for part in map(str, first["loc"][1:]) if "[" not in part)
            told = InvalidRequestError(f"{where or 'the request'}: {first['msg']}"[:300], "see /openapi.json")
            if first["type"] == "json_invalid":
                told = InvalidRequestError(*_NO_JSON)
            elif first["type"] == "missing" and not where:
                told = InvalidRequestError("the body is empty", _NO_JSON[1])
        # FastAPI raises this for a body that is nested too deep.
        case HTTPException(status_code=400):
            told = InvalidRequestError(*_NO_JSON)
        case HTTPException(status_code=404) if is_page:
            told = ServiceError("there is no such page", "go back to the searches", status=404)
        case HTTPException(status_code=404):
            told = ServiceError(f"there is nothing at {request.url.path[:200]}", "see /openapi.json", status=404)
        case HTTPException():
            told = ServiceError(str(error.detail), status=error.status_code)
        case _:
            told = ServiceError("the service failed; its log says why", status=500)
    if is_page:
        return frame.error_page(told)
    status, document = problem_document(told)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(document, status, headers=headers, media_type=MEDIA_TYPE)


def make_app(searches: Searches, names: Collection[str] = ()) -> Guard:
    """Return the application over these searches; ``names`` are its additional host names."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Start the queue with the HTTP server, and end it with the server."""
        searches.changes.attach()
        await run_in_threadpool(searches.runner.begin)
        yield
        searches.is_closing = True
        await run_in_threadpool(searches.close)

    app = FastAPI(
        title="autotune",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # A generated client names its functions after these ids, such as searches_submit.
        generate_unique_id_function=lambda route: "_".join([*map(str, route.tags), route.name]),
    )
    app.openapi = functools.cache(lambda: describe_api(app))  # type: ignore[method-assign]
    app.state.searches = searches
    app.state.health = Health(searches)
    app.state.access = Access(searches)
    app.state.feeds = Feeds(searches, app.state.access)
    app.state.rendered = frame.Rendered(searches.changes)
    for kind in (AutotuneError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(frame.SignedOutError, lambda request, error: frame.sign_in_page())
    for router in (api, frame.router, home.router, search.router, compare.router):
        app.include_router(router)
    dashboard = _Dashboard(searches.store)
    app.routes.extend(Route(f"{path}{{rest:path}}", dashboard) for path in DASHBOARD_PATHS)
    return Guard(app, names)


class _Dashboard:
    """The Optuna dashboard, for those who have a token; an ASGI application."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wsgi: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the dashboard, which is made for the first one."""
        request = Request(scope)
        if await access_of(request).identify(request) is None:
            await RedirectResponse("/", 303)(scope, receive, send)
            return
        if self._wsgi is None:
            made: Any = await run_in_threadpool(lambda: app_over(DashboardStorage(self._store), way_back="/"))
            self._wsgi = WSGIMiddleware(made)
        await self._wsgi(scope, receive, send)
