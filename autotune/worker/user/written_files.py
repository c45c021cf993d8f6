"""Know the files that the user's code writes by itself: those of an inspection are told, caches of a trial are removed.

Preprocessing with a function that depends on a script's arguments makes other cache files of ``datasets`` for each
candidate, which are never read again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_MOST = 5
_WRITING = frozenset("wax+")


def watch_written_files(cwd: str) -> list[str]:
    """Return a list that gets the first files which this process opens to write, relative to ``cwd`` where they are."""
    written: list[str] = []
    aside = [
        os.path.realpath(path)
        for path in (tempfile.gettempdir(), os.path.dirname(tempfile.gettempdir()), "/dev", "/proc", "/sys", *_caches())
    ]

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or len(written) >= _MOST:
            return
        path, mode, _ = arguments
        if not isinstance(path, str) or not mode or not _WRITING & set(mode):
            return
        found = os.path.realpath(path)
        is_hidden = found.startswith(os.path.join(Path.home(), "."))
        if "__pycache__" in found or is_hidden:
            return
        if not any(found.startswith(place + os.sep) for place in aside):
            shown = os.path.relpath(found, cwd) if found.startswith(os.path.realpath(cwd) + os.sep) else found
            if shown not in written:
                written.append(shown)

    sys.addaudithook(on_event)
    return written


def note_cache_files(list_file: str) -> None:
    """Have the cache files of ``datasets`` that this process makes written down, to be removed with the trial."""

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        # datasets writes to a temporary file and moves it.
        if event == "os.rename":
            path = os.path.abspath(os.fsdecode(arguments[1]))
            name = os.path.basename(path)
            # One that was there before is the user's.
            if name.startswith("cache-") and name.endswith(".arrow") and not os.path.exists(path):
                with open(list_file, "a", encoding="utf-8") as file:
                    file.write(f"{path}\n")

    sys.addaudithook(on_event)


def _caches() -> list[str]:
    """List the folders of caches, which are there to be written to."""
    home = os.environ.get("XDG_CACHE_HOME", os.path.join(Path.home(), ".cache"))
    named = [os.environ.get(name) for name in ("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME")]
    return [home, *filter(None, named)]
