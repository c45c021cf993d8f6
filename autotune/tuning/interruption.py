"""End a search on a signal: Ctrl-C after the running trial; a second Ctrl-C, SIGTERM or SIGHUP at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass
class Interruption:
    """Tells a search to end: after the running trial where ``asked``, which a signal handler sets, or at once."""

    asked: bool = False
    _is_held: bool = False
    """Whether ending at once is delayed."""
    _is_owed: bool = False
    """Whether it was asked for meanwhile."""

    def end_at_once(self) -> None:
        """Raise ``KeyboardInterrupt``: now or, in a block of ``held``, at the end of the block."""
        if not self._is_held:
            raise KeyboardInterrupt
        self._is_owed = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay a signal that ends the search at once until the end of the block.

        Otherwise a trial might stay recorded as running although it is not, or the other way round. Where the block
        raises an error, that error ends the search.
        """
        self._is_held, self._is_owed = True, False
        try:
            yield
        finally:
            self._is_held = False
        if self._is_owed:
            raise KeyboardInterrupt


def ending_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end, without SIGHUP where it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if is_ignored else [signal.SIGHUP])]


@contextlib.contextmanager
def interrupted_by_signals(interruption: Interruption, note: Callable[[str], None]) -> Iterator[None]:
    """End the search after the running trial on a first Ctrl-C, and at once on a second; ignore further ones.

    SIGTERM and SIGHUP, from batch systems and closing terminals, end it at once. Only the main thread may handle
    signals; a search in another thread must be ended by its caller.
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
            interruption.end_at_once()

    before = {number: signal.signal(number, on_signal) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
