"""How a GPU is at one moment: its memory, who is on it, what slows it down, whether it still answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

# NVML API reference, "NvmlClocksEventReasons". A power cap in software is the rule on a large GPU under load and
# says nothing of others; idling, application clocks and display clocks are the owner's wish.
SLOWDOWNS: dict[int, str] = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
POWER_CAP = 0x04


@dataclass(frozen=True, slots=True)
class Condition:
    """One reading; ``None`` is what the driver does not say."""

    free_bytes: int | None = None
    pids: frozenset[int] = frozenset()
    """Of all processes on the GPU but this one; in a container they may be the host's numbers, or missing."""
    clock_events: int | None = None
    """NVML's bits: why the clocks are below their maximum."""
    sm_clock_mhz: int | None = None
    temperature_celsius: int | None = None
    uncorrected_errors: int | None = None
    """ECC errors that could not be corrected, since the driver was loaded."""
    is_lost: bool = False
    """NVML says that the GPU is lost, or has fallen off the bus."""

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """What throttles the GPU beyond its power cap, in words."""
        return tuple(word for bit, word in SLOWDOWNS.items() if (self.clock_events or 0) & bit)

    @property
    def is_power_capped(self) -> bool:
        """Whether the clocks are lowered to keep within the power limit."""
        return bool((self.clock_events or 0) & POWER_CAP)


@dataclass(frozen=True, slots=True)
class GpuPolicy:
    """Settings of a GPU that its owner chose and that decide its speed; ``None`` is what NVML does not say.

    NVML has no function that reads clocks locked with ``nvidia-smi --lock-gpu-clocks``.
    """

    power_limit_watts: float | None = None
    sm_application_clock_mhz: int | None = None
    memory_application_clock_mhz: int | None = None
    sm_clock_offset_mhz: int | None = None
    memory_clock_offset_mhz: int | None = None
    has_ecc: bool | None = None
    """Whether memory errors are corrected, which costs bandwidth on some GPUs."""

    def document(self) -> dict[str, Any]:
        """Return the settings as JSON-ready data."""
        return dataclasses.asdict(self)
