"""Render what all pages share: the frame around them, tables, badges, errors and the form to sign in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from autotune import __version__
from autotune.core.errors import AutotuneError, ServiceError
from autotune.results.html.markup import Child, Markup, element
from autotune.service.access import access_of
from autotune.service.problems import problem_document
from autotune.store.queue import TokenRecord

_LINKS = (("/", "Searches"), ("/compare", "Compare"), ("/dashboard", "Optuna dashboard"))


def page(
    title: str, *children: Child, token: TokenRecord | None = None, current: str = "", status: int = 200
) -> HTMLResponse:
    """Return a page. ``token`` is the visitor's, ``current`` the link that leads here."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="color-scheme", content="light dark"),
        element("title", f"{title}: autotune"),
        element("link", rel="icon", href="/assets/icon.svg"),
        element("link", rel="stylesheet", href="/assets/report.css"),
        element("link", rel="stylesheet", href="/assets/page.css"),
        element("script", src="/assets/page.js", defer=True),
    )
    links = [
        element("a", name, href=path, aria_current="page" if path == current else None)
        for path, name in (_LINKS if token else ())
    ]
    leave = element("form", element("button", "Sign out"), method="post", action="/session/end") if token else None
    lost = element(
        "p",
        element("strong", "The connection is lost."),
        " What you see may be old. The page tries to connect again.",
        id="lost",
        class_="error",
        hidden=True,
    )
    body = element(
        "body",
        element("a", "Skip to the content", href="#main", class_="skip"),
        element(
            "header",
            element("nav", element("a", "autotune", href="/", class_="name"), links, class_="top", aria_label="Pages"),
            leave,
            class_="bar",
        ),
        element("div", lost, role="status"),
        element("p", id="said", class_="away", role="status"),
        element("main", children, id="main", tabindex=-1),
        element("footer", element("p", f"autotune {__version__}", class_="soft")),
    )
    return HTMLResponse(f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n", status)


def error_box(error: AutotuneError) -> Markup:
    """Render an error with its hint."""
    hint = element("div", error.hint) if error.hint else None
    return element("div", element("strong", error.message), hint, class_="error", role="alert")


def table(what: str, head: Sequence[str], rows: Sequence[Markup]) -> Markup:
    """Render a table that scrolls on a narrow page, also with the keyboard; ``what`` names it for screen readers."""
    cells = [element("th", name, scope="col") for name in head]
    inner = element("table", element("thead", element("tr", cells)), element("tbody", rows))
    return element("div", inner, class_="scroll", role="region", aria_label=what, tabindex=0)


def badge(state: str) -> Markup:
    """Render the state of a search."""
    return element("span", state, class_=f"badge {state}")


def sign_in_page(error: AutotuneError | None = None) -> HTMLResponse:
    """Return the page that asks for a token."""
    field = element("input", name_="token", type="password", required=True, autocomplete="current-password")
    form = element(
        "form",
        element("label", "Token", field),
        element("p", element("button", "Sign in", class_="main")),
        id="sign-in",
        method="post",
        action="/session",
    )
    told = "autotune serve printed a URL with a token when it first started; autotune token add NAME makes another."
    return page(
        "Sign in",
        element("h1", "Sign in"),
        error_box(error) if error else None,
        form,
        element("p", told, class_="soft"),
        status=problem_document(error)[0] if error else 200,
    )


async def _visitor(request: Request) -> TokenRecord | None:
    return await access_of(request).identify_soon(request)


Visitor = Annotated[TokenRecord | None, Depends(_visitor)]


async def form_fields(request: Request) -> dict[str, str]:
    """Return the fields of a form that was posted, without a further library for it."""
    body = (await request.body()).decode("utf-8", "replace")
    return dict(parse_qsl(body, keep_blank_values=True))


_Handler = Callable[[Request, Any], Response | Awaitable[Response]]


def show_errors_as_pages(app: FastAPI) -> None:
    """Answer errors with a page where a browser asks for one; the API keeps its problem documents."""
    for kind in (AutotuneError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _page_or(app.exception_handlers[kind]))


def _page_or(answer: _Handler) -> _Handler:
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


def error_page(error: AutotuneError, token: TokenRecord | None = None) -> HTMLResponse:
    """Return the page that says what went wrong; it asks who has no token, or a wrong one, to sign in."""
    status = problem_document(error)[0]
    if status == 401:
        return sign_in_page(error)
    title = "There is nothing here" if status == 404 else "This did not work"
    back = element("p", element("a", "All searches", href="/"))
    return page(title, element("h1", title), error_box(error), back, token=token, status=status)
