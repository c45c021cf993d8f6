"""Render a part of a page once for all who ask for it at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from autotune.service.change_events import ChangeEvents

# What changes without a notification, such as a device whose process has ended, may be so old.
_OLD_SECONDS = 1.0
# However many ask, and however often the queue changes, rendering takes at most this share of a core.
_SHARE = 0.2
_MOST_KEPT = 100


@dataclass
class _Part:
    """A part as it was rendered last."""

    html: Markup = field(default_factory=Markup)
    count: int = -1
    """The count of changes when rendering began."""
    began: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time that rendering took."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def is_current(self, count: int) -> bool:
        """Return whether the part includes all changes up to this count and is recent."""
        return self.count >= count and time.monotonic() - self.began < _OLD_SECONDS


class Rendered:
    """The parts of pages that were asked for lately."""

    def __init__(self, changes: ChangeEvents) -> None:
        self._changes = changes
        self._parts: dict[str, _Part] = {}

    async def get(self, key: str, render: Callable[[], Markup]) -> Markup:
        """Return a part that includes every change before this call."""
        asked = self._changes.count
        part = self._parts.setdefault(key, _Part())
        if not part.is_current(asked):
            async with part.turn:
                # Another has rendered it while this one waited for the turn.
                if not part.is_current(asked):
                    await self._render(part, render)
        if len(self._parts) > _MOST_KEPT:
            self._parts.pop(next(iter(self._parts)), None)
        return part.html

    async def _render(self, part: _Part, render: Callable[[], Markup]) -> None:
        """Render a part, at most as often as its CPU time allows."""
        pause = part.began + part.cpu_seconds / _SHARE - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        count, began = self._changes.count, time.monotonic()

        def timed() -> tuple[Markup, float]:
            cpu_began = time.thread_time()
            html = render()
            return html, time.thread_time() - cpu_began

        html, cpu_seconds = await run_in_threadpool(timed)
        part.html, part.count, part.began, part.cpu_seconds = html, count, began, cpu_seconds


def rendered_of(request: Request) -> Rendered:
    """Return the rendered parts of the application that serves a request."""
    return cast(Rendered, request.app.state.rendered)
