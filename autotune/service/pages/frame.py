"""Render pages from templates in the frame that all share, and show errors as pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from markupsafe import Markup
from starlette.exceptions import HTTPException

from autotune.core.errors import AutotuneError, ServiceError
from autotune.results.html.markup import environment
from autotune.service.access import access_of
from autotune.service.problems import problem_document
from autotune.store.queue import TokenRecord

_TEMPLATES = environment(Path(__file__).parents[1] / "templates")
_TEMPLATES.filters["in_path"] = lambda text: quote(text, safe="")


def render(template: str, **values: Any) -> Markup:
    """Render a part of a page."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def page(template: str, *, token: TokenRecord | None, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a rendered page; ``token`` is the visitor's."""
    return HTMLResponse(render(template, token=token, status=status, **values), status)


def sign_in_page(error: AutotuneError | None = None) -> HTMLResponse:
    """Return the page that asks for a token."""
    return page("sign_in.html", token=None, error=error, status=problem_document(error)[0] if error else 200)


def error_page(error: AutotuneError, token: TokenRecord | None = None) -> HTMLResponse:
    """Return the page for an error; without a valid token, the sign-in page."""
    status = problem_document(error)[0]
    return sign_in_page(error) if status == 401 else page("error.html", token=token, error=error, status=status)


async def _visitor(request: Request) -> TokenRecord | None:
    return await access_of(request).identify(request)


Visitor = Annotated[TokenRecord | None, Depends(_visitor)]


async def form_fields(request: Request) -> dict[str, str]:
    """Return the fields of a posted form."""
    body = (await request.body()).decode("utf-8", "replace")
    return dict(parse_qsl(body, keep_blank_values=True))


_Handler = Callable[[Request, Any], Response | Awaitable[Response]]


def show_errors_as_pages(app: FastAPI) -> None:
    """Answer errors with a page where a browser asks for one; the API keeps its problem documents."""
    for kind in (AutotuneError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _page_or(app.exception_handlers[kind]))


def _page_or(answer: _Handler) -> _Handler:
    """Return an error handler that answers browsers with a page, others by ``answer``."""

    def handle(request: Request, error: Exception) -> Response | Awaitable[Response]:
        is_page = not request.url.path.startswith(("/v1/", "/parts/", "/assets/"))
        if not is_page or "text/html" not in request.headers.get("accept", ""):
            return answer(request, error)
        match error:
            case AutotuneError():
                told = error
            case HTTPException(status_code=404):
                told = ServiceError("there is no such page", "go back to the searches", status=404)
            case _:
                status = error.status_code if isinstance(error, HTTPException) else 422
                told = ServiceError(str(getattr(error, "detail", "the request cannot be read")), status=status)
        return error_page(told)

    return handle
