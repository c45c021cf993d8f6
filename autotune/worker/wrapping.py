"""Look at the calls of a library's functions, and change a library once it is imported, in the rest of this process."""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call ``act`` with the arguments of each call of a function, before the call."""

    def looked_at(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return function(*args, **kwargs)

    around(owner, name, looked_at)


def after(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call ``act`` with the result and arguments of each call of a function, after the call."""

    def looked_at(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        act(result, *args, **kwargs)
        return result

    around(owner, name, looked_at)


def around(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Replace a function of a class or module by ``act``, which gets the original and the arguments."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return act(function, *args, **kwargs)

    setattr(owner, name, watched)


Change = Callable[[ModuleType], None]


def on_import(name: str, change: Change) -> None:
    """Call ``change`` with a module: now if it is imported, else right after its import.

    An error of ``change`` is raised at the import: nothing is trained with an unchanged module.
    """
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as the other finders do, and has its loader call ``change`` at the end."""

    def __init__(self, name: str, change: Change) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        # The finders behind this one; others may be in front of it by now.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # Not before: some only ask whether there is such a module.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
