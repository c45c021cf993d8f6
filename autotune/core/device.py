"""What is known of one device, as values: a GPU or the CPU, and the processes beside ours on it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

DeviceKind = Literal["cuda", "cpu"]

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
"""The autocasts that are told apart. fp32 is torch's default: matrix products without TF32."""

CAPABILITY_VARIABLE = "AUTOTUNE_DEVICE_CAPABILITY"
"""In the trial server's environment: the GPU's compute capability, ``9.0``, which CUDA need not be started to know."""

CPU_UUID = "cpu"
"""The CPU has no UUID of its own and there is only one of it."""

# CUDA C++ Programming Guide, "Feature Support per Compute Capability": half-precision arithmetic
# from 5.3, bfloat16 arithmetic and TF32 tensor cores from 8.0. torch emulates bfloat16 below 8.0;
# an emulated precision is never the fast one, so it is not offered.
_FP16_CAPABILITY = (5, 3)
_TF32_CAPABILITY = (8, 0)
_BF16_CAPABILITY = (8, 0)


def precisions_of(capability: tuple[int, int]) -> tuple[Precision, ...]:
    """What a GPU of this compute capability computes natively."""
    found: list[Precision] = ["fp32"]
    if capability >= _TF32_CAPABILITY:
        found.append("tf32")
    if capability >= _FP16_CAPABILITY:
        found.append("fp16")
    if capability >= _BF16_CAPABILITY:
        found.append("bf16")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another process that holds memory on the device."""

    pid: int
    """As the driver counts: inside a container it may be a number of the host's."""
    name: str | None
    """``None`` where the driver will not say, as for another user's process."""
    used_bytes: int | None
    """``None`` where the driver does not account memory by process."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or the CPU as it was when it was listed. Bytes are exact, as the driver or the kernel gives them."""

    kind: DeviceKind
    index: int | None
    """Position among the GPUs that this process may use, the N of ``cuda:N``; ``None`` for the CPU."""
    uuid: str
    name: str
    memory_total_bytes: int
    memory_reserved_bytes: int | None
    """What the driver keeps for itself; ``None`` where it is not told apart from what is used."""
    memory_used_bytes: int | None
    """By all processes; includes what the driver reserves exactly where ``memory_reserved_bytes`` is ``None``."""
    memory_free_bytes: int | None
    """``None`` where the machine does not say, as the CPU of a system without /proc."""
    driver: str | None = None
    capability: tuple[int, int] | None = None
    """CUDA compute capability; ``None`` for the CPU and where the driver does not say."""
    neighbours: tuple[Neighbour, ...] = ()
    native_bf16: bool = False
    """Whether the CPU multiplies bfloat16 in hardware; a GPU's capability says it instead."""

    @property
    def label(self) -> str:
        """``cuda:0`` or ``cpu``, as torch and ``--device`` spell it."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """What the device computes natively, in the order of ``autotune.core.candidate.PRECISIONS``."""
        if self.kind == "cpu":
            return ("fp32", "bf16") if self.native_bf16 else ("fp32",)
        return precisions_of(self.capability or (0, 0))

    def document(self) -> dict[str, Any]:
        """As JSON-ready data, with ``label`` and ``precisions`` beside the fields."""
        facts = dataclasses.asdict(self)
        facts["capability"] = list(self.capability) if self.capability else None
        facts["neighbours"] = list(facts["neighbours"])
        return {"label": self.label, **facts, "precisions": list(self.precisions)}
