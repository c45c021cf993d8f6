"""Adapt private names of accelerate."""

from __future__ import annotations

from typing import Any


def with_float32_outputs(forward: Any) -> Any:
    """Wrap a model's ``forward`` as accelerate does under mixed precision: its 16-bit outputs become float32."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    return convert_outputs_to_fp32(forward)


def has_fsdp2() -> bool:
    """Return whether the installed accelerate can shard with FSDP2."""
    from accelerate.utils import fsdp_utils

    return hasattr(fsdp_utils, "fsdp2_prepare_model")
