"""Levers that need more than a field of ``TrainingArguments``: a package, an extra, a variable of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

LeverChoice = Literal["auto", "on", "off"]

# torch reads the older name first and the newer one since 2.9 (c10/cuda/CUDAAllocatorConfig.h).
ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
OLD_ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_NEW_NAME_SINCE = (2, 9)
_EXPANDABLE = "expandable_segments"


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What the environment tells CUDA's caching allocator, setting by setting."""
    text = environment.get(OLD_ALLOCATOR_VARIABLE) or environment.get(ALLOCATOR_VARIABLE) or ""
    # A list in brackets holds commas of its own (roundup_power2_divisions); its pieces have no name and stay with it.
    settings: dict[str, str] = {}
    depth, piece = 0, ""
    for character in text + ",":
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            name, _, value = piece.partition(":")
            if name.strip():
                settings[name.strip()] = value.strip()
            piece = ""
        else:
            piece += character
    return settings


def segments_expand(environment: Mapping[str, str]) -> bool:
    """Whether the environment has CUDA's segments expand already."""
    return allocator_settings(environment).get(_EXPANDABLE, "").lower() == "true"


def with_expandable_segments(environment: Mapping[str, str], *, expand: bool) -> str | None:
    """The allocator's settings of an environment with this one put over it; ``None`` where nothing need be said."""
    settings = allocator_settings(environment)
    if not expand and _EXPANDABLE not in settings:
        return None
    return ",".join(f"{name}:{value}" for name, value in {**settings, _EXPANDABLE: str(expand)}.items())


def allocator_variable(torch_version: str) -> str:
    """The name under which this torch reads the allocator's settings without complaint."""
    major, minor = torch_version.split(".")[:2]
    return ALLOCATOR_VARIABLE if (int(major), int(minor)) >= _NEW_NAME_SINCE else OLD_ALLOCATOR_VARIABLE
