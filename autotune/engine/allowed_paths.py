"""Refuse paths in what others ask for, but for those within the operator's folders.

The service looks when it is asked, and the process that searches looks again on its own machine, where a name of the
hub may be a folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError

_MAY_BE_PATHS = ("model", "dataset", "tokenizer")


def check_paths(options: Document, folders: Sequence[Path]) -> None:
    """Raise ``InvalidRequestError`` for an option of a search that names a path outside these folders."""
    for name in _MAY_BE_PATHS:
        if isinstance(options.get(name), str):
            _check_path(name, options[name], folders)


def _check_path(name: str, value: str, data_folders: Sequence[Path]) -> None:
    """Raise ``InvalidRequestError`` for a path outside the folders that the operator named.

    A name of the catalog or the hub is none, unless there is something of that name here.
    """
    expanded = value
    looks_like_path = value.startswith((".", "~", "/")) or ".." in value.split("/") or "\\" in value or "\0" in value
    try:
        expanded = os.path.expanduser(value)
        is_here = os.path.lexists(expanded)
    except ValueError:
        is_here = True
    if not looks_like_path and not is_here:
        return
    try:
        real = Path(expanded).resolve()
        allowed = os.path.isabs(expanded) and any(real.is_relative_to(folder.resolve()) for folder in data_folders)
    except (ValueError, OSError, RuntimeError):
        allowed = False
    if not allowed:
        folders = ", ".join(map(str, data_folders))
        raise InvalidRequestError(
            f"{name}: this service reads no files at {value[:120]!r}",
            f"name a folder within {folders}"
            if folders
            else "use a name of the catalog or the hub; the operator can "
            "allow folders with autotune serve --data FOLDER",
        )
