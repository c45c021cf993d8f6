"""Stream searches' events and changes of the queue to clients (server-sent events), with one query for all of them."""

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
    """A response of server-sent events. FastAPI's own is not used, since it runs three tasks for each listener."""

    media_type = "text/event-stream"

    # FastAPI reads the default of ``status_code`` when it describes the API.
    def __init__(self, messages: AsyncIterator[bytes], status_code: int = 200) -> None:
        # Proxies must neither keep events back nor cache them.
        super().__init__(messages, status_code, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


def encoded(event_name: str, document: Document, event_id: int | None = None) -> bytes:
    """Return a server-sent event as bytes, whose data is ``document`` as JSON, with ``null`` for NaN and infinity."""
    data = json.dumps(_null_for_nonfinite(document), allow_nan=False)
    return format_sse_event(data_str=data, event=event_name, id=str(event_id) if event_id is not None else None)


def _null_for_nonfinite(value: Any) -> Any:
    """Return JSON data with ``None`` in place of NaN and infinity."""
    if isinstance(value, dict):
        return {name: _null_for_nonfinite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_null_for_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Feed:
    """The events of one search, which a task reads for all listeners until the search ends or the last one leaves."""

    def __init__(self, searches: Searches, access: Access, job_id: str) -> None:
        self._searches = searches
        self._access = access
        self._job_id = job_id
        self.is_over = False
        self.listeners = 0
        # As sent. Events are numbered from 1, so number n is at index n - 1.
        self._events: list[bytes] = []
        self._status: Document | None = None
        # Set, and replaced, when there is something new to send.
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Follow the search, then end the listeners' streams."""
        try:
            await self._follow()
        except Exception:
            # A client whose stream ends early connects again, and its new request tells it what is wrong.
            log.exception("the event feed failed")
        finally:
            self.is_over = True
            self._tell()

    async def _follow(self) -> None:
        """Read new events and the status, and wake the listeners, until the search ends."""
        while not self._searches.is_closing:
            changed = self._searches.changes.next_event(self._job_id)
            job, found = await run_in_threadpool(self._read_news)
            for event in found:
                data = {**event.document, "at": event.created_at.isoformat()}
                self._events.append(encoded(event.kind, data, event.number))
            self._status = job.status
            # Listeners whose token has been removed must leave.
            await self._access.refresh()
            # The search may have more events than one query reads.
            if job.state in ENDED and len(self._events) >= job.events:
                return
            self._tell()
            if not found:
                await wait_for(changed, _POLL_SECONDS)

    def _read_news(self) -> tuple[JobRecord, list[JobEvent]]:
        job = self._searches.job(self._job_id)
        return job, self._searches.store.queue.events(self._job_id, len(self._events), _MOST_AT_ONCE)

    def _tell(self) -> None:
        """Wake all listeners."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def messages(self, last_number: int, token: TokenRecord) -> AsyncIterator[bytes]:
        """Yield what one listener is to be sent, until the search ends or the listener's token is removed.

        This is each event whose number is above ``last_number``, the status whenever it has changed, and a comment
        after long silences.
        """
        sent_status: Document | None = None
        sent_at = time.monotonic()
        while self._access.knows(token):
            # Taken before the events are read: news that come in between then end the wait below.
            news, is_over = self._news, self.is_over
            message = b"".join(self._events[last_number:])
            # A client may name a number that is still to come.
            last_number = max(last_number, len(self._events))
            if self._status is not None and self._status != sent_status:
                sent_status = self._status
                message += encoded("status", sent_status)
            if not message and time.monotonic() - sent_at >= _SILENCE_SECONDS:
                message = _COMMENT
            if message:
                sent_at = time.monotonic()
                yield message
            if is_over:
                return
            await news.wait()


class Feeds:
    """The event streams of one application. Streams of the same job share a ``_Feed``."""

    def __init__(self, searches: Searches, access: Access) -> None:
        self._searches = searches
        self._access = access
        self._followed: dict[str, _Feed] = {}
        """By the job's id."""
        self._listeners_to_changes = 0

    def check_room(self) -> None:
        """Raise ``ServiceError`` where the number of listeners is at its limit."""
        if self._listeners_to_changes + sum(feed.listeners for feed in self._followed.values()) >= MOST_LISTENERS:
            raise ServiceError(f"{MOST_LISTENERS} clients listen to events already", "try again later", status=429)

    async def changes(self, token: TokenRecord) -> AsyncIterator[bytes]:
        """Yield an event ``changed`` at once, and after changes of queue or devices, as long as the token is valid."""
        self._listeners_to_changes += 1
        try:
            while not self._searches.is_closing and self._access.knows(token):
                changed = self._searches.changes.next_event(ANY_CHANGE)
                yield _CHANGED
                # A busy queue changes more often than anybody wants to look.
                await asyncio.sleep(_PAUSE_SECONDS)
                await wait_for(changed, _CHANGES_POLL_SECONDS)
                await self._access.refresh()
        finally:
            self._listeners_to_changes -= 1

    async def events(self, job_id: str, token: TokenRecord, last_number: int = 0) -> AsyncIterator[bytes]:
        """Yield a job's events numbered above ``last_number``, and its status changes, until its end."""
        feed = self._followed.get(job_id)
        if feed is None or feed.is_over:
            feed = self._followed[job_id] = _Feed(self._searches, self._access, job_id)
        feed.listeners += 1
        try:
            async for message in feed.messages(last_number, token):
                yield message
        finally:
            feed.listeners -= 1
            if feed.listeners == 0:
                feed.task.cancel()
                if self._followed.get(job_id) is feed:
                    del self._followed[job_id]


def feeds_of(request: Request) -> Feeds:
    """Return the application's feeds. Raises ``ServiceError`` where the number of listeners is at its limit."""
    feeds = cast("Feeds", request.app.state.feeds)
    feeds.check_room()
    return feeds
