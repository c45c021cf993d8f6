"""Describe one device, the other processes that use it, and the GPU model that predictions are made for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
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
    """Return the precisions for which a GPU of this compute capability has hardware."""
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


# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: one workspace for each thread that multiplies
# matrices, larger on Hopper and datacentre Blackwell.
_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_LARGE_WORKSPACE_BYTES = 4096 * 1024 * 8
_LARGE_WORKSPACE_MAJORS = (9, 10)


@dataclass(frozen=True, slots=True)
class Collective:
    """The cost of a collective, such as an all-reduce: a time for each call, and a rate for the bytes of each GPU."""

    call_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Link:
    """The connection through which GPUs of one host exchange data."""

    kind: Literal["NVLink", "PCIe"]
    bytes_per_second: float
    """Specified, of one GPU in one direction."""
    all_reduce: Collective | None = None
    """Measured on this host, as the next two; ``None`` where it was not."""
    all_gather: Collective | None = None
    group_gather: Collective | None = None
    """An all-gather between the ranks of a group of hybrid sharding."""

    def cases(self, measured: Collective | None) -> tuple[Collective, Collective, Collective]:
        """Return the worst, usual and best cost of a collective, from its measured cost or else the link's rate."""
        # Parts of the rate that an exchange gets, for each of the three cases.
        shares = _SHARES_OF_LINKS[self.kind] if measured is None else _SHARES_OF_MEASURED
        rated = measured or Collective(_SMALLEST_WORK_SECONDS, self.bytes_per_second)
        worst, usual, best = (Collective(rated.call_seconds, rated.bytes_per_second * share) for share in shares)
        return worst, usual, best


# Bus bandwidth of NCCL's all_reduce_perf. NVLink: 230 to 250 of 300 GB/s on eight A100 and 460 to 480 of 450 GB/s on
# eight H100, which sum in the switch (docs.alayanew.com, "NCCL-tests in practice", 2026); 116 of 300 GB/s through the
# bridge of two H100 PCIe (github.com/NVIDIA/nccl-tests/issues/194). PCIe: 35 to 45 of 63 GB/s on eight H100 PCIe (the
# same page), 28 and 35 of 63 GB/s on eight and four RTX 5090 (github.com/NVIDIA/nccl/issues/1639), 6.2 of 15.8 GB/s
# between two RTX 3090 Ti without direct access (github.com/mli/transformers-benchmarks).
_SMALLEST_WORK_SECONDS = 2e-5
"""Least time of one all-reduce: 20 to 40 microseconds for 8 bytes on PCIe and NVLink hosts (nccl-tests; 42 microseconds
on eight RTX 4090 in github.com/NVIDIA/nccl/issues/1530)."""
# All of 35 exchanges of two and four H200 took 0.87 to 1.08 of what two sizes told (studies/several_gpus.py). In
# a step they share the memory with what is computed: the lower one is a choice.
_SHARES_OF_MEASURED = (0.6, 1.0, 1.1)
_SHARES_OF_LINKS = {"NVLink": (0.38, 0.8, 1.05), "PCIe": (0.18, 0.5, 0.71)}

# The rate of 16 lanes, after encoding: 8, 16 and 32 GT/s with 128 of 130 bits (PCI Express base specifications).
PCIE_3, PCIE_4, PCIE_5 = (Link("PCIe", gigabytes * 1e9) for gigabytes in (15.75, 31.5, 63.0))


@dataclass(frozen=True, slots=True)
class Rates:
    """The specified rates at which a GPU computes and moves data."""

    half_flops: float
    """Operations a second of the tensor cores on 16-bit matrices."""
    tf32_flops: float | None
    """``None`` before Ampere."""
    fp32_flops: float
    bandwidth_bytes_per_second: float
    multiprocessors: int
    power_watts: int
    """Power limit of the board."""
    source: str
    link: Link | None = PCIE_4
    """``None`` where several GPUs are not put into one host. Bridges that are sold apart are left out."""

    @property
    def sums_at_half_rate(self) -> bool:
        """Whether tensor cores accumulate in float32 at half their rate, as GeForce cards since Ampere and the L40 do.

        Their 16-bit rate is then twice that of float32, where other chips have four times or more.
        """
        return self.half_flops < 3 * self.fp32_flops


@dataclass(frozen=True, slots=True)
class Chip:
    """A model of GPU: what determines the memory of a training step on it, and the rates that determine its speed."""

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    threads_per_multiprocessor: int = 2048
    name: str = "H200"
    memory_bytes: int | None = None
    rates: Rates | None = None
    """``None`` where no specification gives them: speed is then not predicted."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the cuBLAS workspace of one thread."""
        return _LARGE_WORKSPACE_BYTES if self.capability[0] in _LARGE_WORKSPACE_MAJORS else _WORKSPACE_BYTES

    @property
    def has_flash_attention(self) -> bool:
        """Whether torch has its own flash attention kernel for this GPU: Ampere or newer (sdp_utils.cpp)."""
        return self.capability >= (8, 0)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that the GPU computes natively."""
        return precisions_of(self.capability)

    def decisive(self) -> Chip:
        """Return the chip reduced to what decides how many bytes a step allocates: no name, memory and rates.

        Chips that are equal in this share their predictions of memory.
        """
        return Chip(self.capability, self.multiprocessors, self.threads_per_multiprocessor)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured speed of a machine, by which predictions of step times are adjusted to it."""

    product_size: int
    """Rows, columns and inner dimension of the matrix products that were timed."""
    product_flops: dict[str, float]
    """Operations a second in matrix products, by kind: ``half``, ``tf32``, ``fp32``."""
    bytes_per_second: float | None
    kernel_seconds: float
    dispatch_seconds: float
    collectives: dict[str, Collective] = field(default_factory=dict)
    """Costs between the GPUs, by the name of the field of ``Link``; empty for one GPU."""
