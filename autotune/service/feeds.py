"""Stream events to all listeners, with one query of the database for all of them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any, cast

from fastapi.sse import format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from autotune.core.candidate import Document
from autotune.core.errors import ServiceError
from autotune.service.access import Access
from autotune.service.change_events import ANY_CHANGE, wait_for
from autotune.service.searches import Searches
from autotune.store.queue import ENDED, JobEvent, JobRecord, TokenRecord

# After so long the database is asked anew, for what happened without a notification: another process's writes.
_POLL_SECONDS = 2.0
_CHANGES_POLL_SECONDS = 5.0
# A busy queue changes more often than anybody wants to look.
_PAUSE_SECONDS = 0.5
# A comment after so long keeps a connection open that a proxy would close.
_SILENCE_SECONDS = 15.0
_MOST_AT_ONCE = 1000
MOST_LISTENERS = 2000
"""Each holds a connection open; more are refused."""
_COMMENT = format_sse_event(comment="nothing new")
_CHANGED = format_sse_event(data_str="{}", event="changed")

log = logging.getLogger("autotune.service")


class EventStream(StreamingResponse):
    """The answer that carries server-sent events; FastAPI's own runs three tasks for each listener."""

    media_type = "text/event-stream"

    # FastAPI reads the default of ``status_code`` when it describes the API.
    def __init__(self, messages: AsyncIterator[bytes], status_code: int = 200) -> None:
        # Proxies must neither keep events back nor cache them.
        super().__init__(messages, status_code, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


def encoded(kind: str, document: Document, number: int | None = None) -> bytes:
    """Return an event as bytes to send, with ``null`` in place of NaN and infinity."""
    try:
        data = json.dumps(document, allow_nan=False)
    except ValueError:
        data = json.dumps(_null_for_nonfinite(document), allow_nan=False)
    return format_sse_event(data_str=data, event=kind, id=str(number) if number is not None else None)


def _null_for_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _null_for_nonfinite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_null_for_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Shared:
    """A task that runs as long as somebody listens to what it finds."""

    def __init__(self, searches: Searches, access: Access, key: str) -> None:
        self.searches = searches
        self.access = access
        self.key = key
        self.is_over = False
        self.listeners = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def _follow(self) -> None:
        """Wait for changes and wake the listeners, until the end."""
        raise NotImplementedError

    def messages(self, after: int, token: TokenRecord) -> AsyncIterator[bytes]:
        """Yield the messages after a number, and new ones, for one listener."""
        raise NotImplementedError

    async def _run(self) -> None:
        try:
            await self._follow()
        except Exception:
            # Who listens connects again, and is told then what is wrong.
            log.exception("the event feed failed")
        finally:
            self.is_over = True
            self._tell()

    def _tell(self) -> None:
        """Wake all listeners."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def begin(self) -> None:
        """Add a listener; start the task for the first."""
        self.listeners += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def end(self) -> bool:
        """Remove a listener; return whether it was the last, which ends the task."""
        self.listeners -= 1
        if self.listeners == 0 and self._task is not None:
            self._task.cancel()
        return self.listeners == 0


class _Changes(_Shared):
    """Tells that the queue or the devices changed."""

    async def _follow(self) -> None:
        while not self.searches.is_closing:
            changed = self.searches.changes.next_event(self.key)
            await self.access.refresh()
            self._tell()
            await asyncio.sleep(_PAUSE_SECONDS)
            await wait_for(changed, _CHANGES_POLL_SECONDS)

    async def messages(self, after: int, token: TokenRecord) -> AsyncIterator[bytes]:
        """Yield a message at each change, as long as the token is valid."""
        while not self.is_over and self.access.knows(token):
            news = self._news
            yield _CHANGED
            await news.wait()


class _Search(_Shared):
    """Tells what happens to one search."""

    def __init__(self, searches: Searches, access: Access, key: str) -> None:
        super().__init__(searches, access, key)
        # The event of number 1 first.
        self._events: list[bytes] = []
        self._status: Document | None = None

    async def _follow(self) -> None:
        while not self.searches.is_closing:
            changed = self.searches.changes.next_event(self.key)
            job, found = await run_in_threadpool(self._read_news)
            for event in found:
                data = {**event.document, "at": event.created_at.isoformat()}
                self._events.append(encoded(event.kind, data, event.number))
            self._status = job.status
            await self.access.refresh()
            if job.state in ENDED and len(self._events) >= job.events:
                return
            self._tell()
            if not found:
                await wait_for(changed, _POLL_SECONDS)

    def _read_news(self) -> tuple[JobRecord, list[JobEvent]]:
        job = self.searches.job(self.key)
        return job, self.searches.store.queue.events(self.key, len(self._events), _MOST_AT_ONCE)

    async def messages(self, after: int, token: TokenRecord) -> AsyncIterator[bytes]:
        """Yield the events after this number and status changes, as long as the token is valid."""
        status: Document | None = None
        sent_at = time.monotonic()
        while self.access.knows(token):
            # Read before the events: otherwise news that come in between would be missed.
            news, is_over = self._news, self.is_over
            message = b"".join(self._events[after:])
            after = max(after, len(self._events))
            if self._status is not None and self._status != status:
                status = self._status
                message += encoded("status", status)
            if not message and time.monotonic() - sent_at >= _SILENCE_SECONDS:
                message = _COMMENT
            if message:
                sent_at = time.monotonic()
                yield message
            if is_over:
                return
            await news.wait()


class Feeds:
    """The shared tasks that follow changes, each started for its first listener and ended with its last."""

    def __init__(self, searches: Searches, access: Access) -> None:
        self._searches = searches
        self._access = access
        self._followed: dict[str, _Shared] = {}
        """By the key of its changes: a job's id, or that of any change."""

    def check_room(self) -> None:
        """Raise ``ServiceError`` where the number of listeners is at its limit."""
        if sum(feed.listeners for feed in self._followed.values()) >= MOST_LISTENERS:
            raise ServiceError(f"{MOST_LISTENERS} clients listen to events already", "try again later", status=429)

    async def messages(self, key: str, token: TokenRecord, after: int = 0) -> AsyncIterator[bytes]:
        """Yield the events of the job whose id is ``key``, after a number and until its end.

        For ``ANY_CHANGE`` yield a message at once, and whenever the queue or the devices changed.
        """
        feed = self._followed.get(key)
        if feed is None or feed.is_over:
            kind = _Changes if key == ANY_CHANGE else _Search
            feed = self._followed[key] = kind(self._searches, self._access, key)
        feed.begin()
        try:
            async for message in feed.messages(after, token):
                yield message
        finally:
            if feed.end() and self._followed.get(key) is feed:
                del self._followed[key]


def feeds_of(request: Request) -> Feeds:
    """Return the application's feeds. Raises ``ServiceError`` where the number of listeners is at its limit."""
    feeds = cast("Feeds", request.app.state.feeds)
    feeds.check_room()
    return feeds
