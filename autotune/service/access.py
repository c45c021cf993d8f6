"""Authenticate requests, limit how many a token may send, and hand the service's parts to the routes."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from autotune.core.errors import ServiceError, StorageError
from autotune.service.searches import Searches
from autotune.store.queue import TokenRecord, digest_of

log = logging.getLogger("autotune.service")

COOKIE = "autotune_token"
# After so many wrong tokens from one address in a minute, none that is not known already is looked up for it.
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
    """Who may use the service: those who have a token whose digest is in the database."""

    searches: Searches
    _tokens: dict[str, TokenRecord] = field(default_factory=dict)
    """By digest, as they were read last."""
    _read_at: float = -math.inf
    _guesses: dict[str, deque[float]] = field(default_factory=dict)
    """When there were wrong tokens, by address."""
    _submissions: dict[str, deque[float]] = field(default_factory=dict)

    async def identify(self, request: Request) -> TokenRecord | None:
        """Return the token's record of a request, from a recent copy where possible; ``None`` for an unknown token."""
        token, address = token_of(request), request.client.host if request.client else ""
        return self._recent_record(digest_of(token)) or await run_in_threadpool(self.check, token, address)

    def check(self, token: str, address: str) -> TokenRecord | None:
        """Return the record of a token. Raises ``ServiceError`` for an address with too many wrong tokens."""
        if not token:
            return None
        key = digest_of(token)
        if (believed := self._recent_record(key)) is not None:
            return believed
        if len(self._guesses) > _MOST_ADDRESSES:
            self._guesses.clear()
        guesses = _within_a_minute(self._guesses, address)
        is_locked = len(guesses) >= _MOST_GUESSES
        if not is_locked or not self._is_recent:
            self._read()
        if (found := self._tokens.get(key)) is not None:
            return found
        guesses.append(time.monotonic())
        if is_locked:
            raise ServiceError("too many wrong tokens came from this address", "wait a minute", status=429)
        return None

    async def refresh(self) -> None:
        """Read the tokens again after a while. If the database does not answer, the earlier copy stays."""
        if not self._is_recent:
            with contextlib.suppress(StorageError):
                await run_in_threadpool(self._read)

    def knows(self, token: TokenRecord) -> bool:
        """Return whether the copy of the tokens has this token."""
        return any(token.id == each.id for each in self._tokens.values())

    @property
    def _is_recent(self) -> bool:
        return time.monotonic() - self._read_at < _BELIEVED_SECONDS

    def _recent_record(self, key: str) -> TokenRecord | None:
        return self._tokens.get(key) if self._is_recent else None

    def _read(self) -> None:
        """Read the tokens, and log added and removed ones."""
        known, self._tokens = self._tokens, self.searches.store.queue.tokens_by_digest()
        is_first, self._read_at = self._read_at == -math.inf, time.monotonic()
        changed = known.keys() ^ self._tokens.keys()
        for key in () if is_first else changed:
            token, what = (known[key], "removed") if key in known else (self._tokens[key], "added")
            log.info(f"token {what}", extra={"fields": {"name": token.name, "role": token.role}})

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


def _within_a_minute(moments: dict[str, deque[float]], key: str) -> deque[float]:
    """Return the times of a key's events in the last minute; the caller may append to them."""
    recent = moments.setdefault(key, deque(maxlen=MOST_SUBMISSIONS))
    while recent and time.monotonic() - recent[0] >= _MINUTE_SECONDS:
        recent.popleft()
    return recent


def token_of(request: Request) -> str:
    """Return the token in a request's header or cookie."""
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
    if not token.may_write:
        raise ServiceError(
            f"the token {token.name!r} may only read", "ask the operator for one with the role run", status=403
        )
    return token


async def _counted_submitter(request: Request, token: Annotated[TokenRecord, Depends(_writer)]) -> TokenRecord:
    access_of(request).count_submission(token)
    return token


Reader = Annotated[TokenRecord, Depends(_reader)]
Writer = Annotated[TokenRecord, Depends(_writer)]
Submitter = Annotated[TokenRecord, Depends(_counted_submitter)]
Known = Annotated[Searches, Depends(_searches_of)]
