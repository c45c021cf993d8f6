"""Find the cache files of ``datasets`` that a trial makes, so that none stays that nobody will read."""

from __future__ import annotations

import os
import sys
from typing import Any


def note_cache_files(list_file: str) -> None:
    """Have the cache files of ``datasets`` that this process makes written down, to be removed with the trial.

    Preprocessing with a function that depends on a script's arguments makes others for each candidate, which are never
    read again.
    """

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
