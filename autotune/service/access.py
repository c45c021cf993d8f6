"""Let requests in or refuse them: tokens and their limits, origins, host names, sizes, idle connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from autotune.core.errors import ServiceError, StorageError
from autotune.core.host_name import OWN_NAMES, host_name
from autotune.service.problems import MEDIA_TYPE, problem_document
from autotune.service.searches import Searches
from autotune.store.queue import TokenRecord, digest_of

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
    """The service's outermost ASGI application: refuses requests, limits their bodies, and adds security headers."""

    def __init__(self, app: FastAPI, more_host_names: Collection[str]) -> None:
        self._app = app
        self.openapi = app.openapi
        self._host_names = OWN_NAMES | {name.lower() for name in more_host_names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with a problem document."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = self._problem(scope, headers)
        if scope["path"].startswith("/v1/"):
            # The API takes only JSON; curl names a form as the content type unless told otherwise.
            other_headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope["headers"] = [*other_headers, (b"content-type", b"application/json")]
        if problem is not None:
            code, message, hint = problem
            document = problem_document(ServiceError(message, hint, status=code))[1]
            await JSONResponse(document, code, {"Connection": "close"}, MEDIA_TYPE)(scope, receive, send)
            return
        left_bytes = MOST_BODY_BYTES

        async def receive_limited() -> Message:
            # A body may come without the header Content-Length.
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
        if host_name(host) not in self._host_names:
            # Starlette's TrustedHostMiddleware would answer 400 in plain text, without what the operator can do.
            return 421, "this service does not answer to that host name", "the operator can allow it with --name"
        origin = headers.get("origin")
        is_foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
        is_write = scope["method"] not in _SAFE_METHODS
        if is_foreign or (is_write and headers.get("sec-fetch-site") in ("cross-site", "same-site")):
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
    """Raise this process's limit of open files as far as allowed, to ``_WANTED_FILES`` at most; return the limit."""
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
    most_waiting = max(16, open_files // 4)
    # Connections without a request, the oldest first, each with the timer that closes it.
    waiting: dict[Any, asyncio.TimerHandle] = {}

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(waiting) >= most_waiting:
                next(iter(waiting)).give_up()
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
    """Keeps one log record a minute of asyncio's failed ``socket.accept()``; asyncio logs each of its tries."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at = -_QUIET_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        if "socket.accept()" not in record.getMessage():
            return True
        is_due = time.monotonic() - self._logged_at >= _QUIET_SECONDS
        if is_due:
            self._logged_at = time.monotonic()
            # The traceback adds nothing to the message.
            record.exc_info = None
        return is_due


log = logging.getLogger("autotune.service")

COOKIE = "autotune_token"
# After so many wrong tokens from one address in a minute, an unknown token from it no longer has
# the tokens read from the database at once.
_MOST_GUESSES = 20
_MINUTE_SECONDS = 60.0
_MOST_ADDRESSES = 10_000
# Tokens that were read are believed for so long, so that not every request asks the database; a token that the operator
# removes is refused after that at the latest.
_BELIEVED_SECONDS = 1.0
MOST_SUBMISSIONS = 1200
"""What one token may submit in a minute: no person needs more, and a loop gone wild is stopped before the queue is
full."""


@dataclass
class Access:
    """Decides who may use the service: the holders of a token whose digest is in the database."""

    searches: Searches
    _tokens: dict[str, TokenRecord] = field(default_factory=dict)
    """By digest, as they were read last."""
    _read_at: float = -math.inf
    _is_refreshing: bool = False
    _guesses: dict[str, deque[float]] = field(default_factory=dict)
    """The times of wrong tokens, by address."""
    _submissions: dict[str, deque[float]] = field(default_factory=dict)
    """The times of submissions, by the token's id."""

    async def identify(self, request: Request, token: str | None = None) -> TokenRecord | None:
        """Return the record of a token, by default the request's own; ``None`` for an unknown one.

        Raises ``ServiceError`` for an address with too many wrong tokens.
        """
        token = token_of(request) if token is None else token
        address = request.client.host if request.client else ""
        if not token:
            return None
        digest = digest_of(token)
        if self._is_recent and (believed := self._tokens.get(digest)) is not None:
            return believed
        if len(self._guesses) > _MOST_ADDRESSES:
            self._guesses.clear()
        guesses = _within_a_minute(self._guesses, address)
        # For a locked address the database is not read while the copy of the tokens is recent.
        is_locked = len(guesses) >= _MOST_GUESSES
        if not is_locked or not self._is_recent:
            await run_in_threadpool(self._read)
        if (found := self._tokens.get(digest)) is not None:
            return found
        guesses.append(time.monotonic())
        if is_locked:
            raise ServiceError("too many wrong tokens came from this address", "wait a minute", status=429)
        return None

    async def refresh(self) -> None:
        """Read the tokens again after a while, once for all who ask. The copy stays if the database does not answer."""
        if not self._is_recent and not self._is_refreshing:
            self._is_refreshing = True
            try:
                with contextlib.suppress(StorageError):
                    await run_in_threadpool(self._read)
            finally:
                self._is_refreshing = False

    def knows(self, token: TokenRecord) -> bool:
        """Return whether this token was among those read last."""
        return any(token.id == each.id for each in self._tokens.values())

    @property
    def _is_recent(self) -> bool:
        return time.monotonic() - self._read_at < _BELIEVED_SECONDS

    def _read(self) -> None:
        """Read the tokens, and log added and removed ones."""
        known, tokens = self._tokens, self.searches.store.queue.tokens_by_digest()
        is_first, self._read_at = self._read_at == -math.inf, time.monotonic()
        # At the first reading every token would be logged as added.
        changed = set() if is_first else known.keys() ^ tokens.keys()
        for digest in changed:
            token, change = (known[digest], "removed") if digest in known else (tokens[digest], "added")
            log.info(f"token {change}", extra={"fields": {"name": token.name, "role": token.role}})
        # Last, so that a stream that ends with its token ends after the log says so.
        self._tokens = tokens

    def count_submission(self, token: TokenRecord) -> None:
        """Count a submission of a token. Raises ``ServiceError`` for too many in a minute."""
        recent = _within_a_minute(self._submissions, token.id)
        if len(recent) >= MOST_SUBMISSIONS:
            raise ServiceError(
                f"the token {token.name!r} has submitted {MOST_SUBMISSIONS} requests within a minute",
                "wait a minute",
                status=429,
            )
        recent.append(time.monotonic())


def _within_a_minute(times_by_key: dict[str, deque[float]], key: str) -> deque[float]:
    """Return the times of a key's events in the last minute, as the stored list, to which the caller may append."""
    recent = times_by_key.setdefault(key, deque(maxlen=MOST_SUBMISSIONS))
    while recent and time.monotonic() - recent[0] >= _MINUTE_SECONDS:
        recent.popleft()
    return recent


def token_of(request: Request) -> str:
    """Return the token in a request's header or cookie; an empty string without one."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")


def access_of(request: Request) -> Access:
    """Return the access rules of the application that serves a request."""
    return cast("Access", request.app.state.access)


# FastAPI runs a dependency that is not asynchronous in a thread, which takes longer than what these do.
async def _searches_of(request: Request) -> Searches:
    return cast("Searches", request.app.state.searches)


async def _reader(request: Request) -> TokenRecord:
    """Return the record of the request's token. Raises ``ServiceError`` without a known token."""
    token = await access_of(request).identify(request)
    if token is None and token_of(request):
        hint = "see what autotune serve printed; autotune token add makes another"
        raise ServiceError("this token is not known", hint, status=401)
    if token is None:
        hint = "send it as Authorization: Bearer TOKEN, or set AUTOTUNE_TOKEN"
        raise ServiceError("this needs a token", hint, status=401)
    return token


async def _writer(token: Annotated[TokenRecord, Depends(_reader)]) -> TokenRecord:
    """Return the request's token if it may write. Raises ``ServiceError`` for one that may only read."""
    if not token.may_write:
        raise ServiceError(
            f"the token {token.name!r} may only read", "ask the operator for one with the role run", status=403
        )
    return token


async def _counted_submitter(request: Request, token: Annotated[TokenRecord, Depends(_writer)]) -> TokenRecord:
    """Count a submission of the request's token, and return it. Raises ``ServiceError`` if it may not, or not now."""
    access_of(request).count_submission(token)
    return token


Reader = Annotated[TokenRecord, Depends(_reader)]
Writer = Annotated[TokenRecord, Depends(_writer)]
Submitter = Annotated[TokenRecord, Depends(_counted_submitter)]
Known = Annotated[Searches, Depends(_searches_of)]
