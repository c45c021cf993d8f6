"""Show on stderr what runs: lines, as for each trial of a search, and on a terminal a status line with a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from autotune.cli.output import as_printed, wrapped
from autotune.core.candidate import Document
from autotune.tuning.narrator import Narrator, status_line

# Without a terminal, so many seconds without a line are followed by one that says what runs. A choice.
_QUIET_SECONDS = 20.0
# Kept low, since trials are measured on the same CPU cores.
_REFRESHES_PER_SECOND = 4
_SPINNER_COLUMNS = 2


class ConsoleView:
    """Prints lines and, on a terminal, shows a status line with a clock below them."""

    def __init__(self, console: Console, running: str = "") -> None:
        self._console = console
        self._started_at = self._printed_at = time.monotonic()
        self.shown: Document = {"running": running}
        """The status to show, with the keys of ``Narrator.status``."""

    def status(self) -> Document:
        """Return the status to show. ``View`` gets it from its ``Narrator`` instead."""
        return self.shown

    def status_line(self, columns: int | None = None) -> str:
        """Return the seconds since the start and the status, without the best trial if longer than ``columns``."""
        return status_line(self.status(), time.monotonic() - self._started_at, columns)

    def now(self, running: str) -> None:
        """Print a line on what runs now, and show it as the status."""
        self.shown = {"running": running}
        self.print_line(running)

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print a line without control characters, wrapped on a terminal."""
        self._printed_at = time.monotonic()
        text = as_printed(text)
        if self._console.is_terminal:
            text = wrapped(text, self._console.width)
        self._console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> Text:
        """Return the status line with a running clock, cut at the terminal's width."""
        columns = self._console.width - _SPINNER_COLUMNS
        return Text(as_printed(self.status_line(columns)), no_wrap=True, overflow="ellipsis")

    def keep_saying(self, ended: threading.Event) -> None:
        """Print the status after quiet times, each twice as long as the one before, until ``ended`` is set."""
        quiet_seconds = _QUIET_SECONDS
        while not ended.wait(max(0.1, self._printed_at + quiet_seconds - time.monotonic())):
            # Another thread may have printed a line meanwhile.
            if time.monotonic() >= self._printed_at + quiet_seconds:
                self.print_line(f"  {self.status_line()}", "dim")
                quiet_seconds *= 2


class View(Narrator, ConsoleView):
    """The view of a search: its ``Narrator`` side is told of the progress and prints it here."""

    def __init__(self, console: Console) -> None:
        ConsoleView.__init__(self, console)
        Narrator.__init__(self, self.print_line)


V = TypeVar("V", bound=ConsoleView)


@contextmanager
def open_view(make_view: Callable[[Console], V]) -> Iterator[V]:
    """Make a view of stderr and keep it shown: a status line, or without a terminal occasional status messages."""
    console = Console(stderr=True)
    view = make_view(console)
    if not console.is_terminal:
        ended = threading.Event()
        threading.Thread(target=view.keep_saying, args=[ended], daemon=True).start()
        try:
            yield view
        finally:
            ended.set()
        return
    with console.status(view, refresh_per_second=_REFRESHES_PER_SECOND):
        yield view


def waiting(for_what: str) -> AbstractContextManager[ConsoleView]:
    """Show on stderr what is waited for, with a clock, until the ``with`` block ends."""
    return open_view(lambda console: ConsoleView(console, for_what))
