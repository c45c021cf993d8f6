"""Show what runs on stderr: of a search a line for each trial and, on a terminal, a status line with a clock."""

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
        self._started = self._printed = time.monotonic()
        self.shown: Document = {"running": running}
        """The status to show, with the keys of ``Narrator.status``."""

    def status(self) -> Document:
        """Return the current status."""
        return self.shown

    def status_line(self, columns: int | None = None) -> str:
        """Return the seconds since the start and the status, without the best trial where it exceeds ``columns``."""
        return status_line(self.status(), time.monotonic() - self._started, columns)

    def now(self, running: str) -> None:
        """Print and show what runs now."""
        self.shown = {"running": running}
        self.print_line(running)

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print a line without control characters, wrapped on a terminal."""
        self._printed = time.monotonic()
        text = as_printed(text)
        if self._console.is_terminal:
            text = wrapped(text, self._console.width)
        self._console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> Text:
        """Return the status line with a running clock, cut at the terminal's width."""
        columns = self._console.width - _SPINNER_COLUMNS
        return Text(as_printed(self.status_line(columns)), no_wrap=True, overflow="ellipsis")

    def keep_saying(self, ended: threading.Event) -> None:
        """Print the status after longer and longer quiet times, until the event is set."""
        quiet = _QUIET_SECONDS
        while not ended.wait(max(0.1, self._printed + quiet - time.monotonic())):
            if time.monotonic() >= self._printed + quiet:
                self.print_line(f"  {self.status_line()}", "dim")
                quiet *= 2


class View(Narrator, ConsoleView):
    """Prints the progress of a search."""

    def __init__(self, console: Console) -> None:
        ConsoleView.__init__(self, console)
        Narrator.__init__(self, self.print_line)


V = TypeVar("V", bound=ConsoleView)


@contextmanager
def open_view(kind: Callable[[Console], V]) -> Iterator[V]:
    """Open a view on stderr with a status line, or without a terminal with occasional status messages."""
    console = Console(stderr=True)
    view = kind(console)
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
    """Show the reason for a wait on stderr, with a clock."""
    return open_view(lambda console: ConsoleView(console, for_what))
