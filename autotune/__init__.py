"""autotune finds the fastest way to train a transformer on one device at a fixed effective batch size.

``autotune.search`` is the search as a function, ``autotune.load`` a study that is there already; both are imported
when they are first asked for, so that importing this costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import Result as Result
    from autotune.api import Trial as Trial
    from autotune.api import load as load
    from autotune.api import search as search

__version__ = "0.1.0"
__all__ = ["Result", "Trial", "__version__", "load", "search"]


def __getattr__(name: str) -> Any:
    """The names of ``autotune.api`` that are offered here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("autotune.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
