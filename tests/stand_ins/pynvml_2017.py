"""A stand-in for the module ``pynvml`` of the distribution nvidia-ml-py3 7.352.0, with that release's limits.

Text comes back as bytes, a UUID must be given as bytes, the memory reading takes no version, the process lists
are those of the first version, and there is no function for compute capabilities nor for MIG.
"""

# ruff: noqa: N802
import ctypes
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_INSUFFICIENT_SIZE = 7
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
_NOT_AVAILABLE = 2**64 - 1
_KNOWN = {3: "Not Supported", 6: "Not Found", 12: "NVML Shared Library Not Found", 15: "GPU is lost"}

_library: Any = None


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _KNOWN.get(self.value) or str(nvmlErrorString(self.value))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))


def _nvmlGetFunctionPointer(name: str) -> Any:
    try:
        return getattr(_library, name)
    except AttributeError:
        raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND) from None


def _call(name: str, *arguments: Any) -> None:
    code = _nvmlGetFunctionPointer(name)(*arguments)
    if code:
        raise NVMLError(code)


def _text(name: str, *arguments: Any) -> bytes:
    buffer = ctypes.create_string_buffer(96)
    _call(name, *arguments, buffer, ctypes.c_uint(96))
    return buffer.value


def nvmlInit() -> None:
    global _library
    try:
        _library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND) from None
    _call("nvmlInit_v2")


def nvmlErrorString(code: int) -> bytes:
    function = _nvmlGetFunctionPointer("nvmlErrorString")
    function.restype = ctypes.c_char_p
    found: bytes = function(code)
    return found


def nvmlDeviceGetCount() -> int:
    count = ctypes.c_uint()
    _call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    return count.value


def nvmlDeviceGetHandleByIndex(index: int) -> Any:
    handle = ctypes.c_void_p()
    _call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    return handle


def nvmlDeviceGetHandleByUUID(uuid: bytes) -> Any:
    handle = ctypes.c_void_p()
    _call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid), ctypes.byref(handle))
    return handle


def nvmlDeviceGetUUID(handle: Any) -> bytes:
    return _text("nvmlDeviceGetUUID", handle)


def nvmlDeviceGetName(handle: Any) -> bytes:
    return _text("nvmlDeviceGetName", handle)


def nvmlSystemGetDriverVersion() -> bytes:
    return _text("nvmlSystemGetDriverVersion")


def nvmlSystemGetProcessName(pid: int) -> bytes:
    return _text("nvmlSystemGetProcessName", ctypes.c_uint(pid))


def nvmlDeviceGetMemoryInfo(handle: Any) -> _Memory:
    memory = _Memory()
    _call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return memory


def _processes(name: str, handle: Any) -> list[SimpleNamespace]:
    count = ctypes.c_uint(0)
    code = _nvmlGetFunctionPointer(name)(handle, ctypes.byref(count), None)
    if code == 0:
        return []
    if code != NVML_ERROR_INSUFFICIENT_SIZE:
        raise NVMLError(code)
    found = (_Process * count.value)()
    _call(name, handle, ctypes.byref(count), found)
    return [
        SimpleNamespace(pid=p.pid, usedGpuMemory=None if p.usedGpuMemory == _NOT_AVAILABLE else p.usedGpuMemory)
        for p in found
    ]


def nvmlDeviceGetComputeRunningProcesses(handle: Any) -> list[SimpleNamespace]:
    return _processes("nvmlDeviceGetComputeRunningProcesses", handle)


def nvmlDeviceGetGraphicsRunningProcesses(handle: Any) -> list[SimpleNamespace]:
    return _processes("nvmlDeviceGetGraphicsRunningProcesses", handle)
