"""Switch the recomputation of activations on and off in models of transformers, however deep in a module they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def outermost(modules: Sequence[Any]) -> list[Any]:
    """Return the modules of a list that are inside no other module of the list."""
    inner = {id(part) for each in modules for part in each.modules() if part is not each}
    return [each for each in modules if id(each) not in inner]


def checkpointing_parts(model: Any) -> list[Any]:
    """Return the outermost transformers models within a module that support gradient checkpointing."""
    return outermost([part for part in model.modules() if getattr(part, "supports_gradient_checkpointing", False)])


def enable_checkpointing(model: Any, **options: Any) -> None:
    """Turn on gradient checkpointing, and turn off the cache, in all parts of a model that support checkpointing."""
    for part in checkpointing_parts(model):
        # transformers 5.18 and later deprecate ``gradient_checkpointing_enable``.
        enable = getattr(part, "activation_checkpointing_enable", None) or part.gradient_checkpointing_enable
        enable({"use_reentrant": False}, **options)
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False


def is_checkpointing(model: Any) -> bool:
    """Return whether any part of a model uses gradient checkpointing."""
    for part in checkpointing_parts(model):
        # Newer versions of transformers warn of the second name.
        is_new = hasattr(part, "is_activation_checkpointing")
        if getattr(part, "is_activation_checkpointing" if is_new else "is_gradient_checkpointing", False):
            return True
    return False


def disable_checkpointing(model: Any) -> None:
    """Turn off gradient checkpointing in all parts of a model."""
    for part in checkpointing_parts(model):
        part.gradient_checkpointing_disable()
