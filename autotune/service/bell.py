"""Wake tasks that wait for a change of a job or of the queue, within one process."""

from __future__ import annotations

import asyncio
import contextlib
import threading

NEW_JOB = "a job waits"
ANY_CHANGE = "the queue changed"


class Bell:
    """Asyncio tasks wait for keys; any thread may ring them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[str, asyncio.Event] = {}
        self._guard = threading.Lock()
        self.rings = 0
        """Counts the changes: as long as it stays, so does what a page shows of the queue."""

    def attach(self) -> None:
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def ticket(self, key: str) -> asyncio.Event:
        """Return what the next ring of a key sets.

        Take it before looking: then no ring between looking and waiting is missed.
        """
        return self._events.setdefault(key, asyncio.Event())

    def ring(self, key: str) -> None:
        """Wake all who have a ticket for this key, and those who wait for any change."""
        with self._guard:
            self.rings += 1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, key)

    def ring_all(self) -> None:
        """Wake everybody, as at the end of the process."""
        for key in list(self._events):
            self.ring(key)

    def _ring(self, key: str) -> None:
        for each in (key, ANY_CHANGE):
            event = self._events.pop(each, None)
            if event is not None:
                event.set()


async def wait_for(ticket: asyncio.Event, seconds: float) -> None:
    """Wait until a ticket's key is rung, at most so long."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ticket.wait(), seconds)
