"""Import ``transformers.models`` without reading the files of all models a second time."""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType

from autotune.worker.wrapping import on_import


def import_models() -> None:
    """Import ``transformers.models``, and thereby transformers, whose files it reads once; call it before any import.

    transformers reads a thousand files for the list of its modules, and reads them again for ``transformers.models``,
    since its cache has room for 128 folders (5.23 has more than 400): 0.4 of 4 seconds on an idle core. Here the cache
    has room for all. Versions without such a cache are imported as usual.
    """
    on_import("transformers.utils.import_utils", _keep_all)
    importlib.import_module("transformers.models")


def _keep_all(import_utils: ModuleType) -> None:
    """Give the function of transformers that reads a folder's modules a cache without a limit."""
    name = "create_import_structure_from_path"
    if (read := getattr(import_utils, name, None)) is not None:
        setattr(import_utils, name, functools.cache(inspect.unwrap(read)))
