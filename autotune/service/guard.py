"""Refuse requests from other origins, to other host names or with too large bodies, and idle connections."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from autotune.core.errors import ServiceError
from autotune.core.host_name import OWN_NAMES, host_name
from autotune.service.problems import MEDIA_TYPE, problem_document

MOST_BODY_BYTES = 1024 * 1024
_TOO_LARGE = (413, f"a request may not be longer than {MOST_BODY_BYTES} bytes", "send less at once")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_CSP = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
# The Optuna dashboard's page sets styles and its own settings within the page.
_DASHBOARD_CSP = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; frame-ancestors 'none'; object-src 'none'"
)
DASHBOARD_PATHS = ("/dashboard", "/static/", "/api/", "/favicon")
"""What the dashboard's own page asks for, from the root."""


class Guard:
    """An ASGI application around another one."""

    def __init__(
        self, app: FastAPI, names: Collection[str] = (), around: Callable[[FastAPI], ASGIApp] | None = None
    ) -> None:
        self._app: ASGIApp = around(app) if around is not None else app
        self.openapi = app.openapi
        self._names = OWN_NAMES | {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with a problem document."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = self._problem(scope, headers)
        if scope["path"].startswith("/v1/"):
            # All that the API takes is JSON; curl says that it sends a form.
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope["headers"] = [*others, (b"content-type", b"application/json")]
        if problem is not None:
            code, message, hint = problem
            document = problem_document(ServiceError(message, hint, status=code))[1]
            await JSONResponse(document, code, {"Connection": "close"}, MEDIA_TYPE)(scope, receive, send)
            return
        left_bytes = MOST_BODY_BYTES

        async def receive_limited() -> Message:
            # A body may come without a length.
            nonlocal left_bytes
            message = await receive()
            left_bytes -= len(message.get("body", b""))
            if left_bytes < 0:
                raise HTTPException(413, _TOO_LARGE[1])
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                of_dashboard = scope["path"].startswith(DASHBOARD_PATHS)
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _DASHBOARD_CSP if of_dashboard else _CSP
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-Frame-Options"] = "DENY"
                # With no-referrer a browser would send "Origin: null" with the forms of the page itself.
                headers["Referrer-Policy"] = "same-origin"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                if not scope["path"].startswith("/assets/") and not of_dashboard:
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive_limited, send_with_headers)

    def _problem(self, scope: Scope, headers: Headers) -> tuple[int, str, str] | None:
        """Return status, problem and hint for a request to refuse; ``None`` for an allowed request."""
        host = headers.get("host", "")
        if host_name(host) not in self._names:
            # Starlette's TrustedHostMiddleware would answer 400 in plain text, without what the operator can do.
            return 421, "this service does not answer to that host name", "the operator can allow it with --name"
        origin = headers.get("origin")
        is_foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
        writes = scope["method"] not in _SAFE_METHODS
        if is_foreign or (writes and headers.get("sec-fetch-site") in ("cross-site", "same-site")):
            return 403, "requests from pages of other sites are refused", "use the service's own page, or the API"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18:
            return 400, "Content-Length is not a number", "send the length of the body in bytes"
        return _TOO_LARGE if int(length) > MOST_BODY_BYTES else None


HEAD_SECONDS = 10.0
"""How long a client may take to send the head of its first request."""
_WANTED_FILES = 65_536
_QUIET_SECONDS = 60.0


def raise_open_files() -> int:
    """Raise this process's limit of open files to the maximum; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft


def limited_protocol(open_files: int) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit on connections that have not sent a request yet.

    A quarter of the open files is for them. A connection beyond that replaces the one that has waited longest.
    """
    most = max(16, open_files // 4)
    waiting: dict[Any, asyncio.TimerHandle] = {}

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(waiting) >= most:
                longest = next(iter(waiting))
                longest.give_up()
            waiting[self] = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.give_up)

        def give_up(self) -> None:
            """Close the connection."""
            self._stop_waiting()
            if self.transport is not None and not self.transport.is_closing():
                self.transport.abort()

        def _stop_waiting(self) -> None:
            timer = waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

    return LimitedProtocol


class OncePerMinute(logging.Filter):
    """Lets through what asyncio says of a socket that it cannot accept, once a minute: it would say so at each try."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at = -_QUIET_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        if "socket.accept()" not in record.getMessage():
            return True
        is_due = time.monotonic() - self._said_at >= _QUIET_SECONDS
        if is_due:
            self._said_at = time.monotonic()
            record.exc_info = None
        return is_due
