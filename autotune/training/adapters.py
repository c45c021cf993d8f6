"""Look through the adapters that peft puts around a model."""

from __future__ import annotations

from typing import Any


def without_adapters(model: Any) -> Any:
    """Return the model of transformers within peft's, or the model itself where it has no adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
