"""Check who may use the service, and hand its parts to the functions that answer requests."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from autotune.core.errors import ServiceError
from autotune.service.searches import Searches
from autotune.service.tokens import digest, may_write
from autotune.store.queue import TokenRecord

COOKIE = "autotune_token"
# So many wrong tokens from one address in a minute are refused without a look.
_MOST_GUESSES = 20
_GUESS_SECONDS = 60.0
MOST_SUBMISSIONS = 1200
"""What one token may submit in a minute: no person needs more, and a loop gone wild is stopped before the queue is
full."""


@dataclass
class Access:
    """Who may use the service: tokens in the database, and those of this process, which are kept nowhere."""

    searches: Searches
    own: dict[str, TokenRecord] = field(default_factory=dict)
    """By digest."""
    _guesses: dict[str, list[float]] = field(default_factory=dict)
    _submissions: dict[str, deque[float]] = field(default_factory=dict)

    def identify(self, request: Request) -> TokenRecord | None:
        """Return the token of a request, from its header or from the page's cookie."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")
        return self.check(token, request.client.host if request.client else "")

    def check(self, token: str, address: str) -> TokenRecord | None:
        """Return the record of a token; ``ServiceError`` for an address that has guessed too often."""
        if not token:
            return None
        key = digest(token)
        found = self.own.get(key) or self.searches.store.queue.token(key)
        if found is None:
            self._count_guess(address)
        return found

    def count_submission(self, token: TokenRecord) -> None:
        """Count what a token submits; ``ServiceError`` where that is too much in a minute."""
        moment, recent = time.monotonic(), self._submissions.setdefault(token.id, deque())
        while recent and moment - recent[0] >= 60.0:
            recent.popleft()
        if len(recent) >= MOST_SUBMISSIONS:
            raise ServiceError(
                f"the token {token.name!r} has submitted {MOST_SUBMISSIONS} requests within a minute",
                "wait a minute",
                status=429,
            )
        recent.append(moment)

    def _count_guess(self, address: str) -> None:
        moment = time.monotonic()
        recent = [then for then in self._guesses.get(address, []) if moment - then < _GUESS_SECONDS]
        if len(self._guesses) > 10_000:
            self._guesses.clear()
        self._guesses[address] = [*recent, moment]
        if len(recent) >= _MOST_GUESSES:
            raise ServiceError("too many wrong tokens came from this address", "wait a minute", status=429)


def access_of(request: Request) -> Access:
    """Return the access rules of the application that serves a request."""
    return cast(Access, request.app.state.access)


def searches_of(request: Request) -> Searches:
    """Return the searches of the application that serves a request."""
    return cast(Searches, request.app.state.searches)


# FastAPI runs a dependency that is not asynchronous in a thread, which takes longer than what these do.


async def _known(request: Request) -> Searches:
    return searches_of(request)


async def _reader(request: Request) -> TokenRecord:
    token = await run_in_threadpool(access_of(request).identify, request)
    if token is None:
        raise ServiceError(
            "this needs a token", "send it as Authorization: Bearer TOKEN, or set AUTOTUNE_TOKEN", status=401
        )
    return token


async def _runner(token: Annotated[TokenRecord, Depends(_reader)]) -> TokenRecord:
    if not may_write(token):
        raise ServiceError(
            f"the token {token.name!r} may only read", "ask the operator for one with the role run", status=403
        )
    return token


async def _submitter(request: Request, token: Annotated[TokenRecord, Depends(_runner)]) -> TokenRecord:
    access_of(request).count_submission(token)
    return token


Reader = Annotated[TokenRecord, Depends(_reader)]
Writer = Annotated[TokenRecord, Depends(_runner)]
Submitter = Annotated[TokenRecord, Depends(_submitter)]
Known = Annotated[Searches, Depends(_known)]
