"""Authenticate requests, limit how many a token may send, and hand the service's parts to the routes."""

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
# A token that was found is believed for so long, so that not every request asks the database; a token that the operator
# removes is refused after that at the latest.
_BELIEVED_SECONDS = 1.0
_MOST_BELIEVED = 1000
MOST_SUBMISSIONS = 1200
"""What one token may submit in a minute: no person needs more, and a loop gone wild is stopped before the queue is
full."""


@dataclass
class Access:
    """Who may use the service: those who have a token whose digest is in the database."""

    searches: Searches
    _found: dict[str, tuple[float, TokenRecord]] = field(default_factory=dict)
    """Tokens that were found, by digest, and when."""
    _guesses: dict[str, list[float]] = field(default_factory=dict)
    _submissions: dict[str, deque[float]] = field(default_factory=dict)

    def identify(self, request: Request) -> TokenRecord | None:
        """Return the token of a request, from its header or from the page's cookie."""
        return self.check(_token_of(request), request.client.host if request.client else "")

    async def identify_soon(self, request: Request) -> TokenRecord | None:
        """Return the token of a request; mostly without a thread, since it was just looked up."""
        return self._believed(digest(_token_of(request))) or await run_in_threadpool(self.identify, request)

    def check(self, token: str, address: str) -> TokenRecord | None:
        """Return the record of a token; ``ServiceError`` for an address that has guessed too often."""
        if not token:
            return None
        key = digest(token)
        if (believed := self._believed(key)) is not None:
            return believed
        found = self.searches.store.queue.token(key)
        if found is None:
            self._count_guess(address)
            return None
        if len(self._found) >= _MOST_BELIEVED:
            self._found.clear()
        self._found[key] = time.monotonic(), found
        return found

    def _believed(self, key: str) -> TokenRecord | None:
        then, found = self._found.get(key, (-_BELIEVED_SECONDS, None))
        return found if time.monotonic() - then < _BELIEVED_SECONDS else None

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


def _token_of(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")


def access_of(request: Request) -> Access:
    """Return the access rules of the application that serves a request."""
    return cast(Access, request.app.state.access)


def searches_of(request: Request) -> Searches:
    """Return the searches of the application that serves a request."""
    return cast(Searches, request.app.state.searches)


# FastAPI runs a dependency that is not asynchronous in a thread, which takes longer than what these do.


async def _known(request: Request) -> Searches:
    return searches_of(request)


def _no_token(*, was_given: bool) -> ServiceError:
    if was_given:
        message, hint = "this token is not known", "see what autotune serve printed; autotune token add makes another"
    else:
        message, hint = "this needs a token", "send it as Authorization: Bearer TOKEN, or set AUTOTUNE_TOKEN"
    return ServiceError(message, hint, status=401)


async def _reader(request: Request) -> TokenRecord:
    token = await access_of(request).identify_soon(request)
    if token is None:
        raise _no_token(was_given=bool(_token_of(request)))
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
