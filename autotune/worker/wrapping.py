"""Wrap functions of libraries, find the user's line that calls them, and change a library once it is imported."""

from __future__ import annotations

import functools
import importlib.abc
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Replace a function of ``owner``, so that ``act`` is called with the arguments before each of its calls."""

    def act_and_call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return function(*args, **kwargs)

    around(owner, name, act_and_call)


def after(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Replace a function of ``owner``, so that ``act`` is called with result and arguments after each of its calls."""

    def call_and_act(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        act(result, *args, **kwargs)
        return result

    around(owner, name, call_and_act)


def around(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Replace a function of a class, module or object by ``act``, which gets the original function and arguments."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return act(function, *args, **kwargs)

    setattr(owner, name, watched)


Change = Callable[[ModuleType], None]


def on_import(name: str, change: Change) -> None:
    """Call ``change`` with a module: now if it is imported, else right after its import.

    An error of ``change`` is raised by the import, so that nothing is trained with an unchanged module.
    """
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by the finders behind it, and makes the module's loader call ``change`` after the import."""

    def __init__(self, name: str, change: Change) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of this finder's module, with a loader that calls ``change``; ``None`` for other modules."""
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
            # The finder stays until the import: some callers only ask whether there is such a module.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


Lines = Iterable[tuple[FrameType, int]]
"""Frames with the number of the line that each is at, innermost first."""

# Packages whose lines no message names, as it names none of Python itself.
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
    """Return the innermost line of the user's own code, else of a package that is no framework: ``train.py:12``.

    ``None`` where there is neither. Messages name this line.
    """
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
