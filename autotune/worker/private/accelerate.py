"""Adapt private names of accelerate."""

from __future__ import annotations

from typing import Any


def with_float32_outputs(forward: Any) -> Any:
    """Wrap a model's ``forward`` as accelerate does under mixed precision: its 16-bit outputs become float32."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    return convert_outputs_to_fp32(forward)
