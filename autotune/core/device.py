"""Describe one device, a GPU or the CPU, and the other processes that use it, as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

DeviceKind = Literal["cuda", "cpu"]

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
"""The precisions of autocast that are told apart. fp32 is torch's default, with matrix products in full precision."""

CAPABILITY_VARIABLE = "AUTOTUNE_DEVICE_CAPABILITY"
"""Environment variable of the trial server with the GPU's compute capability (``9.0``), so that it can be known
without starting CUDA."""

CPU_UUID = "cpu"
"""Stands in for a UUID: there is only one CPU device, and it has none."""

# CUDA C++ Programming Guide, "Feature Support per Compute Capability": half-precision arithmetic
# from 5.3, bfloat16 arithmetic and TF32 tensor cores from 8.0. torch emulates bfloat16 below 8.0;
# an emulated precision is never the fast one, so it is not offered.
_LEAST_CAPABILITY: dict[Precision, tuple[int, int]] = {"fp32": (0, 0), "tf32": (8, 0), "fp16": (5, 3), "bf16": (8, 0)}


def precisions_of(capability: tuple[int, int]) -> tuple[Precision, ...]:
    """Return the precisions that a GPU of this compute capability computes natively."""
    return tuple(precision for precision, least in _LEAST_CAPABILITY.items() if capability >= least)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another process that holds memory on the device."""

    pid: int
    """As the driver counts processes; inside a container this may be the host's number."""
    name: str | None
    """``None`` where the driver does not tell, as for another user's process."""
    used_bytes: int | None
    """``None`` where the driver does not account memory by process."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or the CPU at the time it was listed. Bytes are exact, as the driver or the kernel reports them."""

    kind: DeviceKind
    index: int | None
    """Position among the GPUs that this process may use, the N of ``cuda:N``; ``None`` for the CPU, and for a MIG
    instance that CUDA_VISIBLE_DEVICES does not show."""
    uuid: str
    name: str
    memory_total_bytes: int
    memory_reserved_bytes: int | None
    """Memory that the driver keeps for itself; ``None`` where it is counted as used."""
    memory_used_bytes: int | None
    """Used by all processes. Includes the driver's own memory exactly where ``memory_reserved_bytes`` is ``None``."""
    memory_free_bytes: int | None
    """``None`` where the system does not tell, as for a CPU without /proc."""
    driver: str | None = None
    capability: tuple[int, int] | None = None
    """CUDA compute capability; ``None`` for the CPU and where the driver does not tell."""
    neighbours: tuple[Neighbour, ...] = ()
    native_bf16: bool = False
    """Whether the CPU multiplies bfloat16 in hardware. For a GPU its capability tells."""
    mig_uuids: tuple[str, ...] | None = None
    """The MIG instances into which the GPU is split; ``None`` for a GPU that CUDA uses as a whole."""

    @property
    def label(self) -> str:
        """``cuda:0``, ``cpu`` or the UUID of a MIG instance, as ``--device`` spells it."""
        if self.index is not None:
            return f"{self.kind}:{self.index}"
        return self.uuid if self.kind == "cuda" else self.kind

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that the device computes natively, in the order of ``autotune.core.candidate.PRECISIONS``."""
        if self.kind == "cpu":
            return ("fp32", "bf16") if self.native_bf16 else ("fp32",)
        return precisions_of(self.capability or (0, 0))

    def document(self) -> dict[str, Any]:
        """Return the device as JSON-ready data: its fields, ``label`` and ``precisions``."""
        facts = dataclasses.asdict(self)
        facts["capability"] = list(self.capability) if self.capability else None
        facts["neighbours"] = list(facts["neighbours"])
        facts["mig_uuids"] = None if self.mig_uuids is None else list(self.mig_uuids)
        return {"label": self.label, **facts, "precisions": list(self.precisions)}
