"""Put the HTTP API together: routes, access rules, errors as problem documents, and the guard around them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Collection

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from autotune import __version__
from autotune.core.errors import AutotuneError, InvalidRequestError, ServiceError
from autotune.service.access import Access
from autotune.service.feeds import Feeds
from autotune.service.guard import Guard
from autotune.service.openapi import describe_api
from autotune.service.predictions import Predict, Predictions
from autotune.service.problems import MEDIA_TYPE, problem_document
from autotune.service.routes import health, predictions, verifications
from autotune.service.routes import searches as searches_routes
from autotune.service.searches import Searches


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
            # Of a union, the member that refused it is named in brackets.
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
    answers predictions.
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
    app.state.health = health.Health(searches)
    app.state.access = Access(searches)
    app.state.feeds = Feeds(searches, app.state.access)
    for kind in (AutotuneError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    for router in (health.router, searches_routes.router, predictions.router, verifications.router):
        app.include_router(router)
    if extend is not None:
        extend(app)
    return Guard(app, names, around=around)
