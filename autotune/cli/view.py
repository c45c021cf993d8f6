"""Show a running search on stderr: a line for each trial and, on a terminal, a status line."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from autotune.cli.output import as_printed
from autotune.tuning.narrator import Narrator

# Without a terminal, so many seconds without a line are followed by one that says what runs. A choice.
_QUIET_SECONDS = 20.0
# Kept low, since trials are measured on the same CPU cores.
_REFRESHES_PER_SECOND = 4


class ConsoleView(ABC):
    """Prints lines and, on a terminal, shows a status line below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed = time.monotonic()

    @abstractmethod
    def status_line(self) -> str:
        """Return the status as it is now."""

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print a line as it is, but for what a terminal would obey."""
        self._printed = time.monotonic()
        self._console.print(as_printed(text), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> Text:
        """Return the status line, made again at each refresh so that its clock runs; cut at the terminal's width."""
        return Text(as_printed(self.status_line()), no_wrap=True, overflow="ellipsis")

    def keep_saying(self, ended: threading.Event) -> None:
        """Print the status after each quiet time, which gets longer, until the event is set."""
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
    """Open a view on this process's stderr, with a status line; without a terminal that is printed when it is quiet."""
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
