"""Look at the calls of a library's functions, for the rest of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call ``act`` with the arguments of each call of a function of a class or module, before it."""

    def looked_at(function: Callable[..., Any], /, *words: Any, **options: Any) -> Any:
        act(*words, **options)
        return function(*words, **options)

    _wrap(owner, name, looked_at)


def after(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call ``act`` with the result and the arguments of each call of a function of a class or module, after it."""

    def looked_at(function: Callable[..., Any], /, *words: Any, **options: Any) -> Any:
        result = function(*words, **options)
        act(result, *words, **options)
        return result

    _wrap(owner, name, looked_at)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*words: Any, **options: Any) -> Any:
        return around(function, *words, **options)

    setattr(owner, name, watched)
