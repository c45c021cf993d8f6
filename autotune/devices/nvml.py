"""Read GPUs through NVIDIA's management library (NVML) and its Python module ``pynvml``.

Two distributions install that module, and both work: ``nvidia-ml-py``, which is maintained, and ``nvidia-ml-py3`` of
2017, which returns bytes for text and lacks the second version of the memory reading and compute capabilities. Those
differences are handled at the end of this file. Without the NVML library there are no GPUs, which is no error. Any
other problem is kept as a sentence (``nvml_problem``), so that one failing GPU does not hide the others.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from autotune.core.device import Device, Neighbour
from autotune.devices.host import host_memory

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
    """One reading of a GPU's state, to see what disturbs a measurement. ``None`` is what the driver does not tell."""

    free_bytes: int | None = None
    pids: frozenset[int] = frozenset()
    """Other processes on the GPU. In a container they may have the host's numbers, or be missing."""
    drawing_pids: frozenset[int] = frozenset()
    """Processes among ``pids`` that only draw, such as a desktop's compositor."""
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


# nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t, nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlReturn_t.
_SM_CLOCK, _GPU_SENSOR, _UNCORRECTED, _VOLATILE = 1, 0, 1, 0
_GRAPHICS_CLOCK, _MEMORY_CLOCK = 0, 2
_GPU_IS_LOST = 15


# nvml.h, nvmlGpuTopologyLevel_t, in the words of nvidia-smi topo -m.
_TOPOLOGY = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


class GpuMemory(NamedTuple):
    """Device memory, in bytes."""

    total: int
    reserved: int | None
    """Memory that the driver keeps for itself; ``None`` where it is part of ``used``."""
    used: int
    free: int


class NvmlSession:
    """NVML, opened once in a process. A forked process opens its own session (see ``current_session``)."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.problems: list[str] = []
        self._binding: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._handles: dict[str, Any] = {}
        self._open()

    def _open(self) -> None:
        """Import ``pynvml`` and initialize NVML; a failure is recorded in ``problems``, but for a missing library."""
        try:
            import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]
        except ImportError as error:
            self.problems.append(f"NVML cannot be used ({error}); pip install nvidia-ml-py")
            return
        # NVMLLibraryMismatchError exists in nvidia-ml-py alone, and is no subclass of NVMLError.
        names = ("NVMLError", "NVMLLibraryMismatchError")
        self._errors = tuple(getattr(pynvml, name) for name in names if hasattr(pynvml, name))
        try:
            pynvml.nvmlInit()
        except self._errors as error:
            if _code(error) != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                self.problems.append(f"NVML does not start: {_sentence(error)}")
            return
        self._binding = pynvml

    def devices(self, visible: str | None) -> tuple[Device, ...]:
        """Return the GPUs that this value of ``CUDA_VISIBLE_DEVICES`` makes visible, in its order.

        A GPU that cannot be read is left out and recorded in ``problems``; the others keep their index. A GPU with MIG
        instances is followed by its instances.
        """
        if self._binding is None:
            return ()
        self.problems.clear()
        try:
            count = self._binding.nvmlDeviceGetCount()
        except self._errors as error:
            self.problems.append(f"the GPUs cannot be counted: {_sentence(error)}")
            return ()
        handles = [self._named_handle(f"GPU {number}", "Index", number) for number in range(count)]
        uuids = [None if handle is None else self._uuid(handle) for handle in handles]
        devices = []
        # ``shown`` is a GPU's number in nvidia-smi, or the UUID of a MIG instance.
        for index, shown in enumerate(visible_gpus(visible, uuids)):
            handle = handles[shown] if isinstance(shown, int) else self._named_handle(shown, "UUID", shown.encode())
            device = None if handle is None else self._device(index, handle)
            if device is None:
                continue
            instances = self._instances(handle) if isinstance(shown, int) else None
            parts = None if instances is None else tuple(instance.uuid for instance in instances)
            devices += [replace(device, mig_uuids=parts), *(instances or ())]
        return tuple(devices)

    def _instances(self, handle: Any) -> list[Device] | None:
        """Return the MIG instances of a GPU; ``None`` where MIG is off. pynvml of 2017 cannot list them."""
        modes = self._two_numbers("nvmlDeviceGetMigMode", handle)
        # The mode now, and the mode after the next reset.
        if modes is None or not modes[0]:
            return None
        slots = range(self._optional("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        handles = [self._optional("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in slots]
        devices = [self._device(None, instance) for instance in handles if instance is not None]
        return [instance for instance in devices if instance is not None]

    def used_bytes(self, uuid: str) -> int | None:
        """Return the memory of a GPU that all processes use; ``None`` for the CPU and where NVML does not provide it.

        Fast enough to call between training steps, since NVML and the GPU's handle stay open.
        """
        if self._binding is None:
            return None
        try:
            memory = self._memory(self._handle(uuid))
        except self._errors:
            return None
        return None if memory is None else memory.used

    def _handle(self, uuid: str) -> Any:
        """Return NVML's handle of the GPU with this UUID, cached; raises NVML's errors."""
        if uuid not in self._handles:
            self._handles[uuid] = self._binding.nvmlDeviceGetHandleByUUID(uuid.encode())
        return self._handles[uuid]

    def _known_handle(self, uuid: str) -> Any | None:
        """Return NVML's handle of the GPU with this UUID; ``None`` without NVML or such a GPU."""
        if self._binding is None:
            return None
        try:
            return self._handle(uuid)
        except self._errors:
            return None

    def energy_joules(self, uuid: str) -> float | None:
        """Return the energy that a GPU has used since its driver was loaded (Volta and later); ``None`` if unknown.

        The difference of two readings is the energy used between them, by all processes.
        """
        millijoules = self._optional("nvmlDeviceGetTotalEnergyConsumption", self._known_handle(uuid))
        return None if millijoules is None else float(millijoules) / 1000

    def location(self, uuid: str) -> tuple[int | None, str | None]:
        """Return a GPU's number in nvidia-smi and its PCI bus id; ``None`` for values that NVML does not provide.

        A MIG instance is located where its GPU is.
        """
        handle = self._whole(self._known_handle(uuid))
        index, pci = self._optional("nvmlDeviceGetIndex", handle), self._optional("nvmlDeviceGetPciInfo", handle)
        bus_id = getattr(pci, "busId", None)
        return None if index is None else int(index), None if bus_id is None else _as_text(bus_id)

    def _whole(self, handle: Any) -> Any:
        """Return the handle of the GPU that a MIG instance is part of; the handle of a whole GPU is returned itself."""
        return self._optional("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle

    def condition(self, uuid: str) -> Condition | None:
        """Return the state of a GPU now; ``None`` for the CPU, and without NVML or such a GPU."""
        if self._binding is None:
            return None
        try:
            handle = self._handle(uuid)
            memory = self._memory(handle)
        except self._errors as error:
            return Condition(is_lost=True) if _code(error) == _GPU_IS_LOST else None
        events = self._optional("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if events is None:
            # Drivers before release 535 have the same reading under this name.
            events = self._optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        computing, drawing = (
            {int(process.pid) for process in self._optional(f"nvmlDeviceGet{kind}RunningProcesses", handle) or ()}
            for kind in ("Compute", "Graphics")
        )
        return Condition(
            free_bytes=None if memory is None else memory.free,
            pids=frozenset(self._memory_by_process(handle)),
            drawing_pids=frozenset(drawing - computing),
            clock_events=events,
            sm_clock_mhz=self._optional("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            temperature_celsius=self._optional("nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
            uncorrected_errors=self._optional("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        )

    def policy(self, uuid: str) -> dict[str, float | None] | None:
        """Return the settings of a GPU that its owner chose and that affect its speed; ``None`` without such a GPU.

        A value is ``None`` where NVML does not tell it. NVML cannot read clocks that were locked with ``nvidia-smi
        --lock-gpu-clocks``. ECC costs bandwidth on some GPUs.
        """
        handle = self._whole(self._known_handle(uuid))
        if handle is None:
            return None
        milliwatts = self._optional("nvmlDeviceGetPowerManagementLimit", handle)
        ecc = self._optional("nvmlDeviceGetEccMode", handle)
        return {
            "power_limit_watts": None if milliwatts is None else milliwatts / 1000,
            "sm_application_clock_mhz": self._optional("nvmlDeviceGetApplicationsClock", handle, _GRAPHICS_CLOCK),
            "memory_application_clock_mhz": self._optional("nvmlDeviceGetApplicationsClock", handle, _MEMORY_CLOCK),
            "sm_clock_offset_mhz": self._optional("nvmlDeviceGetGpcClkVfOffset", handle),
            "memory_clock_offset_mhz": self._optional("nvmlDeviceGetMemClkVfOffset", handle),
            # The current mode; the second value is the mode after the next restart.
            "has_ecc": None if ecc is None else bool(ecc[0]),
        }

    def busy_pids(self, uuid: str, since_seconds: float) -> dict[int, int]:
        """Return the processes that computed on a GPU since then (as ``time.time`` counts), and their peak use in %."""
        handle = self._handles.get(uuid)
        busy: dict[int, int] = {}
        for sample in self._optional("nvmlDeviceGetProcessUtilization", handle, int(since_seconds * 1e6)) or ():
            busy[int(sample.pid)] = max(int(sample.smUtil), busy.get(int(sample.pid), 0))
        return busy

    def links(self, uuids: Sequence[str]) -> tuple[str, ...]:
        """Return the link of each pair of GPUs, in order, in nvidia-smi's words: ``NVLink``, ``PIX`` … ``SYS``.

        ``unknown`` where NVML does not provide it.
        """

        def link(one: Any, other: Any) -> str:
            if one is None or other is None:
                return "unknown"
            # nvml.h: NVML_P2P_CAPS_INDEX_NVLINK is 2, NVML_P2P_STATUS_OK is 0.
            if self._optional("nvmlDeviceGetP2PStatus", one, other, 2) == 0:
                return "NVLink"
            return _TOPOLOGY.get(self._optional("nvmlDeviceGetTopologyCommonAncestor", one, other), "unknown")

        return tuple(link(*pair) for pair in itertools.combinations(map(self._known_handle, uuids), 2))

    def _named_handle(self, name: str, by: str, *arguments: Any) -> Any:
        """Return a handle by ``Index`` or ``UUID``; ``None`` on failure, with a problem recorded under ``name``."""
        try:
            return getattr(self._binding, f"nvmlDeviceGetHandleBy{by}")(*arguments)
        except self._errors as error:
            self.problems.append(f"{name}: {_sentence(error)}")
            return None

    def _uuid(self, handle: Any) -> str | None:
        uuid = self._optional("nvmlDeviceGetUUID", handle)
        return None if uuid is None else _as_text(uuid)

    def _device(self, index: int | None, handle: Any) -> Device | None:
        """Return a GPU as a device; record a problem and return ``None`` without name or memory size."""
        try:
            uuid = _as_text(self._binding.nvmlDeviceGetUUID(handle))
            name = _as_text(self._binding.nvmlDeviceGetName(handle))
            memory = self._memory(handle)
        except self._errors as error:
            where = "a MIG instance" if index is None else f"cuda:{index}"
            self.problems.append(f"{where}: {_sentence(error)}")
            return None
        if memory is None:
            # A GPU without memory of its own uses the host's.
            shared = host_memory()
            free_bytes = shared.free_bytes
            used_bytes = None if free_bytes is None else shared.total_bytes - free_bytes
            total_bytes, reserved_bytes = shared.total_bytes, None
        else:
            total_bytes, reserved_bytes, used_bytes, free_bytes = memory
        driver = self._optional("nvmlSystemGetDriverVersion")
        return Device(
            kind="cuda",
            index=index,
            uuid=uuid,
            name=name,
            memory_total_bytes=total_bytes,
            memory_reserved_bytes=reserved_bytes,
            memory_used_bytes=used_bytes,
            memory_free_bytes=free_bytes,
            driver=None if driver is None else _as_text(driver),
            capability=self._capability(handle),
            neighbours=self._neighbours(handle),
        )

    def _memory(self, handle: Any) -> GpuMemory | None:
        """Return the memory of a GPU; ``None`` for a GPU that shares the host's memory.

        A driver before release 510 lacks the second version of the NVML function, and counts reserved memory as used. A
        GPU without its own memory (GB10, for example) supports neither version.
        """
        version = getattr(self._binding, "nvmlMemory_v2", None)
        if version is not None:
            info = self._optional("nvmlDeviceGetMemoryInfo", handle, version)
            if info is not None and info.total:
                return GpuMemory(int(info.total), int(info.reserved), int(info.used), int(info.free))
        try:
            info = self._binding.nvmlDeviceGetMemoryInfo(handle)
        except self._errors as error:
            if _code(error) == self._binding.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise
        return GpuMemory(int(info.total), None, int(info.used), int(info.free)) if info.total else None

    def _capability(self, handle: Any) -> tuple[int, int] | None:
        """Return the CUDA compute capability; for a MIG instance, of its GPU."""
        name, whole = "nvmlDeviceGetCudaComputeCapability", self._whole(handle)
        return self._two_numbers(name, handle) or (None if whole is handle else self._two_numbers(name, whole))

    def own_bytes(self, uuid: str) -> int | None:
        """Return the bytes that this process uses on a GPU, including its CUDA context.

        ``None`` where the driver does not count by process (on Windows), or uses the host's process ids in a container.
        """
        handle = self._known_handle(uuid)
        for process in self._optional("nvmlDeviceGetComputeRunningProcesses", handle) or ():
            if int(process.pid) == self.process_id and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        return None

    def _memory_by_process(self, handle: Any) -> dict[int, int | None]:
        """Return the GPU memory of other processes by process id, for computing and graphics."""
        used_bytes: dict[int, int | None] = {}
        for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self._optional(function, handle) or ():
                used_bytes[int(process.pid)] = process.usedGpuMemory
        used_bytes.pop(self.process_id, None)
        return used_bytes

    def _neighbours(self, handle: Any) -> tuple[Neighbour, ...]:
        """Return the other processes on a GPU with their names."""
        processes = []
        for pid, size_bytes in sorted(self._memory_by_process(handle).items()):
            name = self._optional("nvmlSystemGetProcessName", pid)
            processes.append(Neighbour(pid, _as_text(name) if name else None, size_bytes))
        return tuple(processes)

    def _two_numbers(self, name: str, handle: Any) -> tuple[int, int] | None:
        """Call an NVML function with two results, even if pynvml of 2017 does not wrap it; ``None`` if it fails."""
        if (found := self._optional(name, handle)) is not None:
            return int(found[0]), int(found[1])
        import ctypes  # as late as pynvml, which brings it: it would be a tenth of importing this module

        first, second = ctypes.c_int(), ctypes.c_int()
        function = self._optional("_nvmlGetFunctionPointer", name)
        if function is None or function(handle, ctypes.byref(first), ctypes.byref(second)) != 0:
            return None
        return first.value, second.value

    def _optional(self, name: str, *arguments: Any) -> Any:
        """Call a function of pynvml; return ``None`` where pynvml, driver or device do not support it.

        The result is also ``None`` where an argument is, such as the handle of a missing GPU.
        """
        function = getattr(self._binding, name, None)
        if function is None or None in arguments:
            return None
        try:
            return function(*arguments)
        except self._errors:
            return None


_session: NvmlSession | None = None


def current_session() -> NvmlSession:
    """Return this process's NVML session, opened on first use. A forked child opens its own, and leaves its parent's.

    The library (driver 580) answers a child "Uninitialized" until it opens its own session. If the child shut down the
    inherited one, the parent's next reading would fail with "Unknown Error".
    """
    global _session
    if _session is None or _session.process_id != os.getpid():
        _session = NvmlSession()
    return _session


def gpu_number(uuid: str) -> int | None:
    """Return a GPU's number in nvidia-smi; ``None`` for a MIG instance and without NVML."""
    return None if uuid.startswith("MIG-") else current_session().location(uuid)[0]


def nvml_problem() -> str | None:
    """Return why GPUs may be missing from the last listing; ``None`` without problems."""
    return "; ".join(current_session().problems) or None


def visible_gpus(visible: str | None, uuids: Sequence[str | None]) -> tuple[int | str, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` makes visible: positions in ``uuids``, or a MIG instance's UUID.

    ``uuids`` are those of all GPUs in nvidia-smi's order, ``None`` for one that cannot be read. The rules are CUDA's
    (CUDA programming guide, "CUDA Environment Variables") and, where those leave gaps, torch's. An entry is the number
    of a GPU, the beginning of exactly one UUID, or a MIG instance. The first entry that is none of these ends the list.
    A repeated entry hides everything. CUDA shows a process at most one MIG instance (NVIDIA MIG user guide, "CUDA
    Device Enumeration").
    """
    if visible is None:
        return tuple(range(len(uuids)))
    shown: list[int | str] = []
    for entry in visible.split(","):
        gpu = _visible_gpu(entry.strip(), uuids)
        if gpu is None:
            break
        if gpu in shown:
            return ()
        if isinstance(gpu, str):
            # After a GPU, a MIG instance is hidden; it ends the list in any case.
            return tuple(shown) or (gpu,)
        shown.append(gpu)
    return tuple(shown)


def _visible_gpu(entry: str, uuids: Sequence[str | None]) -> int | str | None:
    """Return the position or MIG UUID for one entry of ``CUDA_VISIBLE_DEVICES``; ``None`` for an invalid entry."""
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [position for position, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    # Parsed as CUDA does with C's strtoul: "1gpu" is 1, and "-1" is no GPU.
    number = re.match(r"\+?\d+", entry, flags=re.ASCII)
    position = int(number.group()) if number else len(uuids)
    return position if position < len(uuids) else None


def _code(error: Exception) -> int | None:
    """Return the code of an NVML error; ``None`` for the error that pynvml and the library do not match."""
    return getattr(error, "value", None)


# The rest of this file is for the differences between nvidia-ml-py and nvidia-ml-py3 of 2017.


def _as_text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _sentence(error: Exception) -> str:
    """Return the message of an NVML error, for the end of a sentence."""
    try:
        # The older binding formats an unknown error as the repr of bytes.
        return str(error).removeprefix("b'").removesuffix("'").rstrip(".")
    except Exception:  # its text for a foreign code may itself ask a library that is not there
        return f"NVML error {_code(error)}"
