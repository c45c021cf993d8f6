"""End a search on a signal: Ctrl-C after the running trial; a second Ctrl-C, SIGTERM or SIGHUP at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.core.signals import ending_signals


@dataclass
class Interruption:
    """Tells a search to end after the running trial."""

    asked: bool = False
    """Whether it is to end; a signal handler sets it."""


@contextlib.contextmanager
def interrupted_by_signals(interruption: Interruption, note: Callable[[str], None]) -> Iterator[None]:
    """End the search after the running trial on a first Ctrl-C, and at once on a second; ignore further ones.

    SIGTERM and SIGHUP, from batch systems and closing terminals, end it at once, by a ``KeyboardInterrupt``. Only the
    main thread may handle signals; a search in another thread must be ended by its caller.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_pressed = is_ended = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal has_pressed, is_ended
        if is_ended:
            return
        interruption.asked = True
        if number == signal.SIGINT and not has_pressed:
            has_pressed = True
            # Where the signal came in the middle of a print, another one is refused.
            with contextlib.suppress(RuntimeError):
                note("ending after the running trial; press Ctrl-C again to end at once")
        else:
            is_ended = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
