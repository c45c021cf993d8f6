"""Delay the signals that end a process while it does what must not be left half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end, without SIGHUP where it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


@contextlib.contextmanager
def signals_delayed() -> Iterator[None]:
    """Call the handlers of ``ending_signals`` at the end of the block, for signals that arrive within it.

    A handler that raises ``KeyboardInterrupt`` could otherwise do so after a process was started and before its id is
    known, or between two changes that belong together. Signals without a handler in Python are not delayed. Nothing is
    done outside the main thread: no handler runs there.
    """
    handlers = {int(number): handler for number in ending_signals() if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    is_over = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        if is_over:
            # A signal's exception has ended the loop below before this handler was replaced.
            handlers[number](number, frame)
        else:
            arrived.append((number, frame))

    try:
        for number in handlers:
            signal.signal(number, on_signal)
        yield
    finally:
        is_over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # Not ``signal.raise_signal``: asyncio, which is told of a signal on its arrival, would be told twice.
        for number, frame in arrived:
            handlers[number](number, frame)
