"""Let a few threads of one process write at a time: first come, first served, but urgent ones before all others.

SQLite lets one writer in, and those that wait for its lock sleep in between; threads of one process need not. A server
lets in many, but a process has only so many connections, and those that wait for one are served in no order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class PrioritySemaphore:
    """Admits ``places`` threads at a time: urgent ones first, others in the order in which they asked."""

    def __init__(self, places: int) -> None:
        self._guard = threading.Lock()
        self._free = places
        self._urgent: deque[threading.Lock] = deque()
        self._others: deque[threading.Lock] = deque()

    @contextmanager
    def take(self, *, is_urgent: bool = False) -> Iterator[None]:
        """Wait for a place, and hold it for as long as the block lasts."""
        gate = threading.Lock()
        gate.acquire()
        with self._guard:
            waits = self._free == 0
            if waits:
                (self._urgent if is_urgent else self._others).append(gate)
            else:
                self._free -= 1
        try:
            if waits:
                gate.acquire()
        except BaseException:
            # Interrupted while it waited, or just as it was given the place.
            with self._guard:
                for waiting in (self._urgent, self._others):
                    if gate in waiting:
                        waiting.remove(gate)
                        raise
            self._pass_on()
            raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        with self._guard:
            waiting = self._urgent or self._others
            if waiting:
                waiting.popleft().release()
            else:
                self._free += 1
