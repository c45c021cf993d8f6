"""Render pages in their common frame, and changing parts once for all visitors; sign a browser in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import parse_qsl, quote

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from autotune.core.errors import AutotuneError, ServiceError
from autotune.results.html import FOLDER, environment
from autotune.service.access import COOKIE, access_of
from autotune.service.change_events import ChangeEvents
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


class SignedOutError(Exception):
    """A browser asks for a page without a known token; the answer is the page that asks for one."""


async def _visitor(request: Request) -> TokenRecord:
    """Return the record of the token of whoever asks for a page. Raises ``SignedOutError`` without a known token."""
    token = await access_of(request).identify(request)
    if token is None:
        raise SignedOutError
    return token


Visitor = Annotated[TokenRecord, Depends(_visitor)]


async def form_fields(request: Request) -> dict[str, str]:
    """Return the fields of a posted form."""
    body = (await request.body()).decode("utf-8", "replace")
    return dict(parse_qsl(body, keep_blank_values=True))


# A part is rendered anew after so long: some changes, as of a device whose process has ended, are not notified.
_OLD_SECONDS = 1.0
# However many ask, and however often the queue changes, rendering a part takes at most this share of a core.
_MOST_CPU_SHARE = 0.2
_MOST_KEPT = 100


@dataclass
class _Part:
    """A part of a page, such as the queue, as it was rendered last."""

    html: Markup = field(default_factory=Markup)
    change_count: int = -1
    """``ChangeEvents.count`` when rendering began."""
    began_at: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time that rendering took."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is rendered."""

    def is_current(self, change_count: int) -> bool:
        """Return whether the part shows the first ``change_count`` changes, and is not old."""
        return self.change_count >= change_count and time.monotonic() - self.began_at < _OLD_SECONDS


class Rendered:
    """Renders parts of pages, and keeps those that were asked for last."""

    def __init__(self, changes: ChangeEvents) -> None:
        self._changes = changes
        self._parts: dict[str, _Part] = {}

    async def get(self, key: str, render: Callable[[], Markup]) -> Markup:
        """Return the part of this key, which shows every change before this call; call ``render`` only if needed."""
        change_count = self._changes.count
        part = self._parts.setdefault(key, _Part())
        if not part.is_current(change_count):
            async with part.turn:
                # Another request may have rendered it while this one waited for its turn.
                if not part.is_current(change_count):
                    await self._render(part, render)
        if len(self._parts) > _MOST_KEPT:
            self._parts.pop(next(iter(self._parts)), None)
        return part.html

    async def _render(self, part: _Part, render: Callable[[], Markup]) -> None:
        """Render a part, after a pause that keeps rendering within ``_MOST_CPU_SHARE``."""
        pause = part.began_at + part.cpu_seconds / _MOST_CPU_SHARE - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        # Read before rendering: a change meanwhile may not be in the part.
        change_count, began_at = self._changes.count, time.monotonic()

        def timed() -> tuple[Markup, float]:
            cpu_began = time.thread_time()
            html = render()
            return html, time.thread_time() - cpu_began

        html, cpu_seconds = await run_in_threadpool(timed)
        part.html, part.change_count, part.began_at, part.cpu_seconds = html, change_count, began_at, cpu_seconds


def rendered_of(request: Request) -> Rendered:
    """Return the rendered parts of the application that serves a request."""
    return cast("Rendered", request.app.state.rendered)


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
    """Return a style sheet, script or icon of the pages."""
    if name not in _ASSETS:
        raise ServiceError("there is no such file", "see the page", status=404)
    folder, kind = _ASSETS[name]
    return FileResponse(folder / name, media_type=kind, headers={"Cache-Control": "no-cache"})


_COOKIE_SECONDS = 30 * 24 * 3600


@router.post("/session")
async def begin_session(request: Request) -> Response:
    """Sign a browser in: set the cookie for the valid token in the form."""
    token = (await form_fields(request)).get("token", "").strip()
    try:
        found = await access_of(request).identify(request, token)
    except ServiceError as error:
        return sign_in_page(error)
    if found is None:
        return sign_in_page(ServiceError("this token is not known", "see what autotune serve printed", status=401))
    answer = RedirectResponse("/", 303)
    is_tls = request.url.scheme == "https"
    answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=is_tls, max_age=_COOKIE_SECONDS)
    return answer


@router.post("/session/end")
def end_session() -> Response:
    """Sign a browser out: remove the cookie."""
    answer = RedirectResponse("/", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer
