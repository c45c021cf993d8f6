"""Find the user's own line among those that a thread is in."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType

Lines = Iterable[tuple[FrameType, int]]
"""Frames with the number of the line that each is at, innermost first."""

# Their lines, and those of Python itself, are nobody's that a message could name.
_FRAMEWORKS = (
    "torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "trl", "peft",
    "sentence_transformers", "autotune",
)  # fmt: skip
_NOT_NAMED = ("<", os.path.dirname(os.path.dirname(__file__)) + os.sep)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")


def lines_above() -> Iterator[tuple[FrameType, int]]:
    """Yield the stack frames and lines above the caller."""
    return traceback.walk_stack(sys._getframe(2))


def module_of(frame: FrameType) -> str:
    """Return the module name of a frame."""
    return str(frame.f_globals.get("__name__", ""))


def users_line(lines: Lines) -> str | None:
    """Return the innermost line of the user's own code, else of a package that is no framework: ``train.py:12``."""
    place = None
    for frame, number in lines:
        path = frame.f_code.co_filename
        is_installed = not set(_INSTALLED).isdisjoint(path.split(os.sep))
        # The trial server runs as ``__main__``.
        if module_of(frame).partition(".")[0] in _FRAMEWORKS or path.startswith(_NOT_NAMED):
            continue
        # Python's own folder may have the packages within it.
        if path.startswith(_STANDARD) and not is_installed:
            continue
        if not is_installed:
            return f"{os.path.basename(path)}:{number}"
        place = place or f"{os.path.basename(path)}:{number}"
    return place
