"""Keep connections that ask for nothing from using up what the service has."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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
