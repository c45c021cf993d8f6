"""The GPUs as NVIDIA's management library (NVML) tells of them, through the module ``pynvml``.

Two distributions install that module, and both work here: ``nvidia-ml-py``, which is kept up, and ``nvidia-ml-py3`` of
2017, which returns bytes for text and knows neither the second version of the memory reading nor compute capabilities.
How it differs is handled at the end of this file. No NVML library means no GPU and is not an error; any other trouble
is kept as a sentence (``nvml_problem``), so that one GPU gone bad does not hide the rest of the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from autotune.core.device import Device, Neighbour
from autotune.devices.condition import Condition, GpuPolicy
from autotune.devices.host import host_memory

# nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t, nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlReturn_t.
_SM_CLOCK, _GPU_SENSOR, _UNCORRECTED, _VOLATILE = 1, 0, 1, 0
_GRAPHICS_CLOCK, _MEMORY_CLOCK = 0, 2
_GPU_IS_LOST = 15


class NvmlSession:
    """NVML, opened once by one process; a process forked from it opens its own (see ``current_session``)."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.problems: list[str] = []
        self._binding: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._handles: dict[str, Any] = {}
        self._open()

    def _open(self) -> None:
        """Load the binding and initialise the library; what stands in the way is kept as a problem."""
        try:
            import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]
        except ImportError as error:
            self.problems.append(f"NVML cannot be asked ({error}); pip install nvidia-ml-py")
            return
        self._errors = _error_classes(pynvml)
        try:
            pynvml.nvmlInit()
        except self._errors as error:
            if _code(error) != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                self.problems.append(f"NVML does not start: {_sentence(error)}")
            return
        self._binding = pynvml

    def devices(self, visible: str | None) -> tuple[Device, ...]:
        """The GPUs that ``CUDA_VISIBLE_DEVICES`` of this value shows, in its order.

        A GPU that cannot be read is left out and noted in ``problems``; the others keep their index.
        """
        if self._binding is None:
            return ()
        self.problems.clear()
        try:
            count = self._binding.nvmlDeviceGetCount()
        except self._errors as error:
            self.problems.append(f"the GPUs cannot be counted: {_sentence(error)}")
            return ()
        handles = [self._handle_at(position) for position in range(count)]
        uuids = [None if handle is None else self._uuid(handle) for handle in handles]
        devices = []
        for index, shown in enumerate(visible_gpus(visible, uuids)):
            handle = handles[shown] if isinstance(shown, int) else self._handle_of_instance(shown)
            device = None if handle is None else self._device(index, handle)
            if device is not None:
                devices.append(device)
        return tuple(devices)

    def used_bytes(self, uuid: str) -> int | None:
        """Bytes in use on a GPU now; ``None`` where there is no such GPU or no answer."""
        if self._binding is None:
            return None
        try:
            memory = self._memory(self._handle(uuid))
        except self._errors:
            return None
        return None if memory is None else memory[2]

    def _handle(self, uuid: str) -> Any:
        """The handle of the GPU of a UUID, looked up once; raises NVML's errors."""
        if uuid not in self._handles:
            self._handles[uuid] = self._binding.nvmlDeviceGetHandleByUUID(uuid.encode())
        return self._handles[uuid]

    def _known_handle(self, uuid: str) -> Any | None:
        """The handle of the GPU of a UUID; ``None`` without NVML and for a GPU that it does not know."""
        if self._binding is None:
            return None
        try:
            return self._handle(uuid)
        except self._errors:
            return None

    def energy_joules(self, uuid: str) -> float | None:
        """Energy that a GPU has used since its driver was loaded (Volta and later); ``None`` where it does not say."""
        handle = self._known_handle(uuid)
        if handle is None:
            return None
        millijoules = self._optional("nvmlDeviceGetTotalEnergyConsumption", handle)
        return None if millijoules is None else float(millijoules) / 1000

    def location(self, uuid: str) -> tuple[int | None, str | None]:
        """A GPU's number, as nvidia-smi counts, and its PCI bus id; ``None`` for what NVML does not say."""
        handle = self._known_handle(uuid)
        if handle is None:
            return None, None
        # An instance of a GPU (MIG) is where the whole one is.
        handle = self._optional("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle
        index, pci = self._optional("nvmlDeviceGetIndex", handle), self._optional("nvmlDeviceGetPciInfo", handle)
        bus_id = getattr(pci, "busId", None)
        return None if index is None else int(index), None if bus_id is None else _text(bus_id)

    def condition(self, uuid: str) -> Condition | None:
        """How a GPU is now; ``None`` without NVML and for a GPU that it does not know."""
        if self._binding is None:
            return None
        try:
            handle = self._handle(uuid)
            memory = self._memory(handle)
        except self._errors as error:
            return Condition(is_lost=True) if _code(error) == _GPU_IS_LOST else None
        events = self._optional("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if events is None:
            # What the same reading was called before release 535.
            events = self._optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return Condition(
            free_bytes=None if memory is None else memory[3],
            pids=frozenset(self._memory_by_process(handle)),
            clock_events=events,
            sm_clock_mhz=self._optional("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            temperature_celsius=self._optional("nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
            uncorrected_errors=self._optional("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        )

    def policy(self, uuid: str) -> GpuPolicy | None:
        """Read the settings that a GPU's owner chose; ``None`` without NVML and for a GPU that it does not know."""
        handle = self._known_handle(uuid)
        if handle is None:
            return None
        # An instance of a divided GPU has no settings of its own.
        whole = self._optional("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        handle = handle if whole is None else whole
        milliwatts = self._optional("nvmlDeviceGetPowerManagementLimit", handle)
        ecc = self._optional("nvmlDeviceGetEccMode", handle)
        return GpuPolicy(
            power_limit_watts=None if milliwatts is None else milliwatts / 1000,
            sm_application_clock_mhz=self._optional("nvmlDeviceGetApplicationsClock", handle, _GRAPHICS_CLOCK),
            memory_application_clock_mhz=self._optional("nvmlDeviceGetApplicationsClock", handle, _MEMORY_CLOCK),
            sm_clock_offset_mhz=self._optional("nvmlDeviceGetGpcClkVfOffset", handle),
            memory_clock_offset_mhz=self._optional("nvmlDeviceGetMemClkVfOffset", handle),
            # The current mode, then the one after the next restart.
            has_ecc=None if ecc is None else bool(ecc[0]),
        )

    def busy_pids(self, uuid: str, since_seconds: float) -> dict[int, int]:
        """Processes that computed on a GPU since a moment (as ``time.time`` counts), with the most per cent of it."""
        handle = self._handles.get(uuid)
        busy: dict[int, int] = {}
        for sample in self._optional("nvmlDeviceGetProcessUtilization", handle, int(since_seconds * 1e6)) or ():
            busy[int(sample.pid)] = max(int(sample.smUtil), busy.get(int(sample.pid), 0))
        return busy

    def _handle_at(self, position: int) -> Any:
        """The handle of the GPU that nvidia-smi shows at a position; ``None``, with a note, if it cannot be had."""
        try:
            return self._binding.nvmlDeviceGetHandleByIndex(position)
        except self._errors as error:
            self.problems.append(f"GPU {position}: {_sentence(error)}")
            return None

    def _handle_of_instance(self, uuid: str) -> Any:
        """The handle of a MIG instance; ``None``, with a note, if it cannot be had."""
        try:
            return self._binding.nvmlDeviceGetHandleByUUID(uuid.encode())
        except self._errors as error:
            self.problems.append(f"{uuid}: {_sentence(error)}")
            return None

    def _uuid(self, handle: Any) -> str | None:
        uuid = self._optional("nvmlDeviceGetUUID", handle)
        return None if uuid is None else _text(uuid)

    def _device(self, index: int, handle: Any) -> Device | None:
        """All that is known of one GPU; ``None``, with a note, if even name or memory cannot be read."""
        try:
            uuid = _text(self._binding.nvmlDeviceGetUUID(handle))
            name = _text(self._binding.nvmlDeviceGetName(handle))
            memory = self._memory(handle)
        except self._errors as error:
            self.problems.append(f"cuda:{index}: {_sentence(error)}")
            return None
        if memory is None:
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
            driver=None if driver is None else _text(driver),
            capability=self._capability(handle),
            neighbours=self._neighbours(handle),
        )

    def _memory(self, handle: Any) -> tuple[int, int | None, int, int] | None:
        """Total, reserved, used and free bytes; ``None`` for a GPU that shares the host's memory.

        A driver before release 510 lacks the second version of the reading and counts what it reserves as used.
        A GPU without memory of its own (GB10, say) supports neither version.
        """
        version = getattr(self._binding, "nvmlMemory_v2", None)
        if version is not None:
            info = self._optional("nvmlDeviceGetMemoryInfo", handle, version)
            if info is not None and info.total:
                return int(info.total), int(info.reserved), int(info.used), int(info.free)
        try:
            info = self._binding.nvmlDeviceGetMemoryInfo(handle)
        except self._errors as error:
            if _code(error) == self._binding.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise
        return (int(info.total), None, int(info.used), int(info.free)) if info.total else None

    def _capability(self, handle: Any) -> tuple[int, int] | None:
        """Return the CUDA compute capability; that of the whole GPU for an instance of it."""
        name = "nvmlDeviceGetCudaComputeCapability"
        function = self._optional("_nvmlGetFunctionPointer", name)
        found = self._optional(name, handle) or _call_for_two_numbers(function, handle)
        if found is not None:
            return int(found[0]), int(found[1])
        whole = self._optional("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return None if whole is None else self._capability(whole)

    def _memory_by_process(self, handle: Any) -> dict[int, int | None]:
        """The processes with memory on a GPU, this one left out; a process may both compute and draw."""
        used_bytes: dict[int, int | None] = {}
        for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self._optional(function, handle) or ():
                used_bytes[int(process.pid)] = process.usedGpuMemory
        used_bytes.pop(self.process_id, None)
        return used_bytes

    def _neighbours(self, handle: Any) -> tuple[Neighbour, ...]:
        """The same with their names."""
        found = []
        for pid, size_bytes in sorted(self._memory_by_process(handle).items()):
            name = self._optional("nvmlSystemGetProcessName", pid)
            found.append(Neighbour(pid, _text(name) or None if name is not None else None, size_bytes))
        return tuple(found)

    def _optional(self, name: str, *arguments: Any) -> Any:
        """What a function of the binding answers; ``None`` where binding, driver or device cannot."""
        function = getattr(self._binding, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._errors:
            return None


_session: NvmlSession | None = None


def current_session() -> NvmlSession:
    """This process's NVML, opened on first use. What a parent opened before a fork is never used in the child.

    A forked child must not shut down what it inherited: the library (driver 580) answers it "Uninitialized" until
    it opens its own, but a shutdown there makes the parent's next reading fail with "Unknown Error".
    """
    global _session
    if _session is None or _session.process_id != os.getpid():
        _session = NvmlSession()
    return _session


def device_used_bytes(uuid: str) -> int | None:
    """Bytes in use on one GPU now, by all processes; ``None`` for the CPU and where NVML gives no answer.

    Cheap enough to call between steps: NVML and the GPU's handle are kept from call to call.
    """
    return current_session().used_bytes(uuid)


def device_energy_joules(uuid: str) -> float | None:
    """Energy that a whole GPU has used since its driver was loaded; ``None`` where NVML gives no answer.

    The difference of two readings is what was used between them, by all processes.
    """
    return current_session().energy_joules(uuid)


def device_condition(uuid: str) -> Condition | None:
    """How a GPU is now; ``None`` for the CPU and where NVML gives no answer."""
    return current_session().condition(uuid)


def gpu_policy(uuid: str) -> GpuPolicy | None:
    """Read the settings of a GPU that decide its speed; ``None`` for the CPU and where NVML gives no answer."""
    return current_session().policy(uuid)


def busy_pids(uuid: str, since_seconds: float) -> dict[int, int]:
    """Processes that computed on a GPU since a moment of ``time.time``, with the most per cent of it that each took."""
    return current_session().busy_pids(uuid, since_seconds)


def nvml_problem() -> str | None:
    """Why GPUs may be missing from the latest listing, in a sentence; ``None`` where nothing stood in the way."""
    return "; ".join(current_session().problems) or None


def visible_gpus(visible: str | None, uuids: Sequence[str | None]) -> tuple[int | str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` shows: positions in ``uuids``, or the UUID of a MIG instance.

    ``uuids`` are those of all GPUs in nvidia-smi's order, ``None`` for one that cannot be read. The rules are
    CUDA's (CUDA programming guide, "CUDA Environment Variables") and, where that is silent, those of torch: an
    entry is the number of a GPU, the beginning of exactly one UUID, or a MIG instance; the first one that is
    none of these ends the list; a repeated one hides everything. CUDA shows a process at most one MIG instance
    (NVIDIA MIG user guide, "CUDA Device Enumeration").
    """
    if visible is None:
        return tuple(range(len(uuids)))
    shown: list[int | str] = []
    for entry in visible.split(","):
        found = _visible_gpu(entry.strip(), uuids)
        if found is None:
            break
        if found in shown:
            return ()
        if isinstance(found, str):
            return tuple(shown) or (found,)
        shown.append(found)
    return tuple(shown)


def _visible_gpu(entry: str, uuids: Sequence[str | None]) -> int | str | None:
    """One entry of ``CUDA_VISIBLE_DEVICES``; ``None`` if it shows nothing."""
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [position for position, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    # Read as C's strtoul would, so that "1gpu" is 1 and "-1" is no GPU.
    number = re.match(r"\+?\d+", entry, flags=re.ASCII)
    position = int(number.group()) if number else len(uuids)
    return position if position < len(uuids) else None


def _code(error: Exception) -> int | None:
    """Return NVML's number of an error; a mismatch of binding and library has none."""
    return getattr(error, "value", None)


# The rest of this file is for the differences between nvidia-ml-py and nvidia-ml-py3 of 2017.


def _error_classes(binding: Any) -> tuple[type[Exception], ...]:
    """Return the classes of errors; the second, which only the newer binding has, is no subclass of the first."""
    names = ("NVMLError", "NVMLLibraryMismatchError")
    return tuple(getattr(binding, name) for name in names if hasattr(binding, name))


def _call_for_two_numbers(function: Any, handle: Any) -> tuple[int, int] | None:
    """Call a function of the library for which the older binding has none of its own."""
    import ctypes  # as late as pynvml, which brings it: it would be a tenth of importing this module

    first, second = ctypes.c_int(), ctypes.c_int()
    if function is None or function(handle, ctypes.byref(first), ctypes.byref(second)) != 0:
        return None
    return first.value, second.value


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _sentence(error: Exception) -> str:
    """Return NVML's words for an error."""
    try:
        # The older binding shows an error that it does not know as the repr of bytes.
        return str(error).removeprefix("b'").removesuffix("'").rstrip(".")
    except Exception:  # its text for a foreign code may itself ask a library that is not there
        return f"NVML error {_code(error)}"
