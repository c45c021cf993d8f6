"""Classify an exception: out of memory in all its wordings, a lost GPU, or another failure."""

from __future__ import annotations

import os
import traceback
from typing import Literal

from autotune.core.outcome import Failed, FailureReason, OutOfMemory
from autotune.core.real_training import PeakBytes

# Lower-case parts of messages for out of memory, each of which has occurred. The exception's type alone is not enough:
# cuBLAS, cuDNN and asynchronous kernels raise plain RuntimeErrors.
_DEVICE_FRAGMENTS = (
    "cuda out of memory",
    "cuda error: out of memory",
    "triton error [cuda]: out of memory",
    "hip out of memory",
    "cublas_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_insufficient_resources",
    "cufft_alloc_failed",
    # NCCL allocates its buffers outside torch's allocator (torch's DistBackendError quotes NCCL's last error).
    "cuda failure 2 'out of memory'",
    "cuda failure 'out of memory'",
    "failed to cuda calloc",
    "nonzero is not supported for tensors with more than int_max",
    "canuse32bitindexmath",
)
# Messages that mean out of memory only near the limit. cuDNN gives them when it cannot allocate a workspace, but also
# for unsupported layers. cuBLAS gives the first when it cannot allocate its handle, but also after a kernel that
# failed.
_DEVICE_FRAGMENTS_NEAR_LIMIT = (
    "cublas_status_not_initialized",
    "cudnn_status_not_supported",
    "cudnn_status_internal_error",
    "cudnn_status_alloc_failed",
)
_HOST_FRAGMENTS = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "unable to allocate",
)
# CPython 3.11's words where it has no memory for a frame. An extension that is wrong is told in the same words.
_HOST_FRAGMENT_NEAR_LIMIT = "error return without exception set"
# oneDNN's message on a CPU. For unsupported operations it says "could not create a primitive descriptor …" instead.
_ONEDNN_LINE = "could not create a primitive"
# Xid errors of the driver, ECC errors and GPUs that fell off the bus, in the words of CUDA (CUDA runtime API,
# cudaError). A kernel's assertion or illegal access is a bug, and leaves the GPU intact, so it is not among them.
_LOST_DEVICE_FRAGMENTS = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "gpu is lost",
    "fallen off the bus",
    "devices are busy or unavailable",
    "device(s) is/are busy or unavailable",
    "no cuda-capable device is detected",
    "unspecified launch failure",
    "hardware stack error",
    "the launch timed out and was terminated",
    "cuda error: unknown error",
    "contained to this gpu",
)
# Long enough for CUDA's message with the memory that was free.
_MOST_CHARACTERS = 300
# Share of the cap from which the limit is near: cuDNN asks for workspaces of a few hundred MiB, a tenth of a small
# card.
_NEAR_LIMIT = 0.9


def is_out_of_memory(error: BaseException, fraction_used: float) -> bool:
    """Return whether an error means out of memory; ``fraction_used`` is peak reserved memory over the cap."""
    return _where_it_ran_out(error, fraction_used) is not None


def _where_it_ran_out(error: BaseException, fraction_used: float) -> Literal["device", "host"] | None:
    """Return where memory ran out, by an error's words, of which some count only near the cap; else ``None``."""
    text, is_near = str(error).lower(), fraction_used >= _NEAR_LIMIT
    of_host = (*_HOST_FRAGMENTS, *([_HOST_FRAGMENT_NEAR_LIMIT] if is_near else []))
    of_device = (*_DEVICE_FRAGMENTS, *(_DEVICE_FRAGMENTS_NEAR_LIMIT if is_near else ()))
    is_onednn_error = text.strip().partition("\n")[0] == _ONEDNN_LINE
    if isinstance(error, MemoryError) or is_onednn_error or any(fragment in text for fragment in of_host):
        return "host"
    is_on_device = type(error).__name__ == "OutOfMemoryError" or any(fragment in text for fragment in of_device)
    return "device" if is_on_device else None


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an error and the errors that it was raised from or while handling, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def package_of(error: BaseException) -> str | None:
    """Return the innermost installed package in which an import failed; ``None`` for torch and transformers alone.

    These two are passed over, since torch registers functions of other packages, and transformers imports packages.
    """
    package = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        _, _, within = frame.f_code.co_filename.partition("site-packages" + os.sep)
        name = within.partition(os.sep)[0].removesuffix(".py")
        if within and name not in ("torch", "transformers", "autotune"):
            package = name
    return package


def first_line(error: BaseException) -> str:
    """Return ``TypeName: the first line of its message``, cut at 300 characters with an ``…``.

    NCCL's errors say what went wrong in their last line, so the lines of such a message are joined. A first line that
    ends with a colon, as dynamo's "backend='inductor' raised:", is joined with the next. An error without a message,
    such as that of an ``assert``, is described by its line of code.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        lines = [trace.line or "" for trace in traceback.extract_tb(error.__traceback__)[-1:]] or [""]
    count = 2 if lines[0].endswith(":") else 1
    if lines[0].startswith("NCCL error"):
        count = len(lines)
    line = f"{type(error).__name__}: {' '.join(lines[:count])}".rstrip(": ")
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 1] + "…"


def classify(
    error: BaseException, *, during: str, on_cpu: bool, peaks: PeakBytes | None = None, cap_bytes: int | None = None
) -> OutOfMemory | Failed:
    """Return the outcome of a trial that ended with an exception in the phase ``during``: out of memory, or a failure.

    ``peaks`` and ``cap_bytes``, where known, tell how near the limit was. With ``on_cpu`` the device's memory is the
    host's, limited for the trial, so that out of memory is always of the ``device``.
    """
    fraction = peaks.reserved / cap_bytes if peaks and cap_bytes else 0.0
    for each in chain_of(error):
        if (where := _where_it_ran_out(each, fraction)) is not None:
            return OutOfMemory(
                first_line(each),
                where="device" if on_cpu else where,
                during=during,
                peak_allocated_bytes=peaks.allocated if peaks else None,
                peak_reserved_bytes=peaks.reserved if peaks else None,
            )
    # Compared by name: importing its package would import transformers, which the trial server imports in its own way.
    if type(error).__name__ == "SettingUnavailableError":
        return Failed("unavailable", str(error), during=during)
    said = [text for each in chain_of(error) if "cuda" in (text := str(each).lower())]
    is_lost = any(fragment in text for text in said for fragment in _LOST_DEVICE_FRAGMENTS)
    reason: FailureReason = "device_lost" if is_lost else "error"
    text = "".join(traceback.format_exception(error))[-20_000:]
    return Failed(reason, first_line(error), during=during, traceback=text)
