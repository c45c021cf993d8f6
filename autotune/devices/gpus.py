"""GPUs by name, for predicting on one that is not at hand. Specified values, not measured ones.

Memory is what ``nvidia-smi`` lists as the total of the common variant. Multiprocessors, threads
and capability are from NVIDIA's architecture whitepapers and the CUDA programming guide's table
of compute capabilities.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from autotune.core.device import Precision, precisions_of
from autotune.core.units import MIB

# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: one for each thread that
# multiplies matrices, larger on Hopper and datacentre Blackwell.
_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_LARGE_WORKSPACE_BYTES = 4096 * 1024 * 8
_LARGE_WORKSPACE_MAJORS = (9, 10)

TYPICAL_CONTEXT_BYTES = 767 * MIB
"""A CUDA context beside the allocator while a model trains: 751 to 771 MiB in 54 trials on an H200 (torch 2.11, driver
580), the median in bf16. Others differ somewhat."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What of a GPU decides how much memory a training step takes on it."""

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    threads_per_multiprocessor: int = 2048
    name: str = "H200"
    memory_bytes: int | None = None

    @property
    def workspace_bytes(self) -> int:
        """cuBLAS's workspace for one thread."""
        return _LARGE_WORKSPACE_BYTES if self.capability[0] in _LARGE_WORKSPACE_MAJORS else _WORKSPACE_BYTES

    @property
    def has_flash_attention(self) -> bool:
        """torch's own flash kernel needs Ampere or newer (sdp_utils.cpp, check_flash_attention_hardware_support)."""
        return self.capability >= (8, 0)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Autocasts that the chip computes natively."""
        return precisions_of(self.capability)

    def document(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return dataclasses.asdict(self) | {"capability": list(self.capability)}

    def decisive_document(self) -> dict[str, Any]:
        """The same without what it is called and how much memory it has, which decide nothing about a step."""
        return {key: value for key, value in self.document().items() if key not in ("name", "memory_bytes")}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Chip:
        """The inverse of ``document``."""
        return cls(**{**document, "capability": tuple(document["capability"])})


def _chip(name: str, memory_mib: int, capability: tuple[int, int], multiprocessors: int, threads: int) -> Chip:
    return Chip(capability, multiprocessors, threads, name, memory_mib * MIB)


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip("rtx-3060-12gb", 12288, (8, 6), 28, 1536),
        _chip("rtx-3080-10gb", 10240, (8, 6), 68, 1536),
        _chip("rtx-3090", 24576, (8, 6), 82, 1536),
        _chip("rtx-4070", 12282, (8, 9), 46, 1536),
        _chip("rtx-4080", 16376, (8, 9), 76, 1536),
        _chip("rtx-4090", 24564, (8, 9), 128, 1536),
        _chip("rtx-5090", 32607, (12, 0), 170, 1536),
        _chip("a6000", 49140, (8, 6), 84, 1536),
        _chip("t4", 15360, (7, 5), 40, 1024),
        _chip("v100-16gb", 16384, (7, 0), 80, 2048),
        _chip("v100-32gb", 32768, (7, 0), 80, 2048),
        _chip("a10g", 23028, (8, 6), 80, 1536),
        _chip("l4", 23034, (8, 9), 58, 1536),
        _chip("l40s", 46068, (8, 9), 142, 1536),
        _chip("a100-40gb", 40960, (8, 0), 108, 2048),
        _chip("a100-80gb", 81920, (8, 0), 108, 2048),
        _chip("h100-80gb", 81559, (9, 0), 132, 2048),
        _chip("h200", 143771, (9, 0), 132, 2048),
    )
}
