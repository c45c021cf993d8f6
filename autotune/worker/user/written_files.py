"""Track the files that the user's code writes, so that a search leaves none behind and overwrites none.

What is made anew by a trial is removed with it; what an inspection makes, such as downloaded data, may be read by the
trials, and is removed when the search ends. A script that would write to a file of the user's is stopped before that.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST = 5
_WRITING = frozenset("wax+")
_REPLACING = frozenset("wa")
# What libraries keep for later runs, compiled kernels among it.
_CACHE_VARIABLES = (
    "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_ASSETS_CACHE", "TRANSFORMERS_CACHE",
    "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH",
    "NUMBA_CACHE_DIR", "MPLCONFIGDIR",
)  # fmt: skip


class WrittenFiles:
    """The files outside of caches and temporary folders that this process opens to write, from ``watch`` on."""

    def __init__(self, cwd: str, list_file: str, refuse: Callable[[str, str], None] | None = None) -> None:
        self.first: list[str] = []
        """The first of them, relative to the working folder where they are in it."""
        self._cwd = cwd
        self._list_file = list_file
        self._refuse = refuse
        """Called before a file is written to that was there before; ``None`` lets that happen."""
        self._process = os.getpid()
        temporary = tempfile.gettempdir()
        self._aside = tuple(
            os.path.realpath(path) + os.sep
            for path in (temporary, os.path.dirname(temporary), "/dev", "/proc", "/sys", *_caches())
        )
        self._inside = os.path.realpath(cwd) + os.sep
        # Who works in a folder of /dev/shm has files of their own there.
        self._aside_inside = tuple(path for path in self._aside if not self._inside.startswith(path))
        self._made = set(_lines(list_file))

    def watch(self) -> None:
        """Look at every file that is opened, made or moved from now on, and at what torch writes by itself."""
        torch: Any = importlib.import_module("torch")
        save = torch.save

        @functools.wraps(save)
        def watched(thing: Any, file: Any, *words: Any, **options: Any) -> None:
            if isinstance(file, str | os.PathLike):
                # Its own writer opens the file, which Python does not see.
                self._opened(os.fspath(file), replaces=True)
            save(thing, file, *words, **options)

        torch.save = watched
        self._move_logs()
        sys.addaudithook(self._on_event)

    def _move_logs(self) -> None:
        """Have a log that would be added to the user's own be written to a temporary file."""
        kind: Any = logging.FileHandler
        make = kind.__init__

        @functools.wraps(make)
        def __init__(handler: Any, filename: Any, *words: Any, **options: Any) -> None:  # noqa: N807
            found = self._place(os.fspath(filename))
            if found is not None and self._is_users(found):
                filename = os.path.join(tempfile.gettempdir(), os.path.basename(found))
            make(handler, filename, *words, **options)

        kind.__init__ = __init__

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, str | bytes) and _writes(mode, flags):
                self._opened(os.fsdecode(path), replaces=_replaces(mode, flags))
        elif event == "os.mkdir":
            found = self._place(os.fsdecode(arguments[0]))
            if found is not None and not os.path.lexists(found):
                self._note(found + os.sep)
        elif event == "os.rename":
            moved, path = (os.path.realpath(os.fsdecode(each)) for each in arguments[:2])
            if moved in self._made:
                self._opened(path, replaces=True)

    def _opened(self, path: str, *, replaces: bool) -> None:
        found = self._place(path)
        if found is None:
            return
        shown = os.path.relpath(found, self._cwd) if found.startswith(self._inside) else found
        if len(self.first) < _MOST and shown not in self.first:
            self.first.append(shown)
        if not os.path.lexists(found):
            self._note(found)
        elif replaces and self._refuse is not None and self._is_users(found) and os.getpid() == self._process:
            self._refuse(
                f"writes to {shown}, which was there before",
                "move that file away, or have it write to a folder that an option --output_dir names",
            )

    def _place(self, path: str) -> str | None:
        """Return where a file is; ``None`` for those that are anybody's to write."""
        found = os.path.realpath(path)
        if "__pycache__" in found or found.startswith(os.path.join(Path.home(), ".")):
            return None
        aside = self._aside_inside if found.startswith(self._inside) else self._aside
        return None if found.startswith(aside) else found

    def _is_users(self, path: str) -> bool:
        """Return whether a file was there before this job began, and has something in it."""
        if path not in self._made:
            # Another process of the job may have made it since.
            self._made |= set(_lines(self._list_file))
        return path not in self._made and os.path.isfile(path) and os.path.getsize(path) > 0

    def _note(self, path: str) -> None:
        self._made.add(path)
        with open(self._list_file, "a", encoding="utf-8") as file:
            file.write(f"{path}\n")


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


def _writes(mode: str | None, flags: int) -> bool:
    return bool(_WRITING & set(mode)) if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))


def _replaces(mode: str | None, flags: int) -> bool:
    return bool(_REPLACING & set(mode)) if mode else bool(flags & (os.O_TRUNC | os.O_APPEND))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _caches() -> list[str]:
    """List the folders of caches, which are there to be written to."""
    home = os.environ.get("XDG_CACHE_HOME", os.path.join(Path.home(), ".cache"))
    return [home, *filter(None, map(os.environ.get, _CACHE_VARIABLES))]
