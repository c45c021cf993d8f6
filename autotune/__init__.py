"""Find the fastest way to train a transformer at a fixed effective batch size, on one device or several of one host.

``autotune.search`` runs a search, ``autotune.load`` opens a recorded study, ``autotune.errors`` holds what both raise.
They are imported when they are first used, so that ``import autotune`` itself takes no time.
"""

from __future__ import annotations

import importlib

# Stands for typing.TYPE_CHECKING. Importing typing takes most of the time until the command line can handle a Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from autotune.api import Result as Result
    from autotune.api import Trial as Trial
    from autotune.api import load as load
    from autotune.api import search as search
    from autotune.core import errors as errors
    from autotune.core.loop import LoopConfig as LoopConfig
    from autotune.core.loop import step as step
    from autotune.core.loop import steps as steps

__version__ = "0.2.0"
__all__ = ["LoopConfig", "Result", "Trial", "__version__", "errors", "load", "search", "step", "steps"]
_OF_LOOPS = ("LoopConfig", "step", "steps")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "errors":
        return importlib.import_module("autotune.core.errors")
    if name in _OF_LOOPS:
        return getattr(importlib.import_module("autotune.core.loop"), name)
    return getattr(importlib.import_module("autotune.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
