"""Describe the state of a GPU at one moment: memory, processes, clocks and errors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

# NVML API reference, "NvmlClocksEventReasons". A software power cap is normal for a large GPU under load, and does not
# show other users. Idling, application clocks and display clocks are the owner's choice.
SLOWDOWNS: dict[int, str] = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
POWER_CAP = 0x04


@dataclass(frozen=True, slots=True)
class Condition:
    """One reading of a GPU's state. ``None`` is what the driver does not tell."""

    free_bytes: int | None = None
    pids: frozenset[int] = frozenset()
    """Processes on the GPU but this one. In a container they may have the host's numbers, or be missing."""
    drawing_pids: frozenset[int] = frozenset()
    """Those of them that only draw, such as a desktop's compositor."""
    clock_events: int | None = None
    """NVML's bits of the reasons why clocks are below their maximum."""
    sm_clock_mhz: int | None = None
    temperature_celsius: int | None = None
    uncorrected_errors: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    is_lost: bool = False
    """Whether NVML reports that the GPU is lost or has fallen off the bus."""

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """Reasons, in words, why the GPU is throttled beyond its power cap."""
        return tuple(word for bit, word in SLOWDOWNS.items() if (self.clock_events or 0) & bit)

    @property
    def is_power_capped(self) -> bool:
        """Whether the clocks are lowered to stay within the power limit."""
        return bool((self.clock_events or 0) & POWER_CAP)


@dataclass(frozen=True, slots=True)
class GpuPolicy:
    """Settings of a GPU that its owner chose and that affect its speed. ``None`` is what NVML does not tell.

    NVML cannot read clocks that were locked with ``nvidia-smi --lock-gpu-clocks``.
    """

    power_limit_watts: float | None = None
    sm_application_clock_mhz: int | None = None
    memory_application_clock_mhz: int | None = None
    sm_clock_offset_mhz: int | None = None
    memory_clock_offset_mhz: int | None = None
    has_ecc: bool | None = None
    """Whether ECC is on, which costs bandwidth on some GPUs."""

    def document(self) -> dict[str, Any]:
        """Return the settings as JSON-ready data."""
        return dataclasses.asdict(self)
