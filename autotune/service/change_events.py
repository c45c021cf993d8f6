"""Tell tasks within one process that a job or the queue has changed, so that they need not poll the database."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable

ANY_CHANGE = "the queue changed"
"""The key of the event that every change sets."""


class ChangeEvents:
    """Asyncio events by key (a job's id, or ``ANY_CHANGE``), which may be set from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        # Only the waiting tasks keep the events, so that nothing is left of a job that nobody follows any more.
        self._events: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self._guard = threading.Lock()
        self.count = 0
        """Number of changes so far. While it stays the same, a page rendered from the queue is up to date."""

    def attach(self) -> None:
        """Bind the events to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def next_event(self, key: str) -> asyncio.Event:
        """Return the event that the next change of a key sets.

        Call this before reading the state: then no change between reading and waiting is missed.
        """
        return self._events.setdefault(key, asyncio.Event())

    def notify(self, key: str) -> None:
        """Wake all tasks that wait for a change of this key, or for any change."""
        self._after_change(self._set, key, ANY_CHANGE)

    def notify_all(self) -> None:
        """Wake all waiting tasks, as at the end of the process."""
        self._after_change(lambda: self._set(*self._events))

    def _after_change(self, wake: Callable[..., None], *keys: str) -> None:
        """Count a change, and call ``wake(*keys)`` in the event loop, the only thread that touches the events."""
        with self._guard:
            self.count += 1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(wake, *keys)

    def _set(self, *keys: str) -> None:
        """Set the events of these keys, and forget them: the next change gets new ones."""
        for key in keys:
            event = self._events.pop(key, None)
            if event is not None:
                event.set()


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, or until the timeout."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
