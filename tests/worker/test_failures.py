"""Test that every wording of out of memory is recognized, and that similar messages are not."""

from typing import Any

import pytest

from autotune.core.outcome import Failed, OutOfMemory
from autotune.core.real_training import PeakBytes
from autotune.worker.failures import classify, first_line

MEMORY: dict[str, Any] = {"peaks": PeakBytes(70, 80), "cap_bytes": 100}
NEAR_THE_CAP = {**MEMORY, "peaks": PeakBytes(70, 95)}


class OutOfMemoryError(RuntimeError):
    """Bears the name of torch's own class, whose message may be anything."""


ON_THE_DEVICE = [
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB"),
    OutOfMemoryError("Allocation on device would exceed allowed memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    ),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpMM`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements, See #51871"),
    RuntimeError("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false."),
]
ON_THE_HOST = [
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 15627264 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("[enforce fail at alloc_cpu.cpp:83] data. DefaultCPUAllocator: not enough memory"),
    MemoryError(),
    MemoryError("Unable to allocate 3.00 GiB for an array with shape (805306368,) and data type float32"),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
]
NEAR_THE_LIMIT_ONLY = [
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input"
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    SystemError("error return without exception set"),
]
LOOK_ALIKES = [
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:2187, remote process exited or there was a network error"),
    RuntimeError("could not create a primitive descriptor for the matmul primitive"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers "
                 "are out of shared memory."),
    RuntimeError("out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes"),
    OSError(28, "No space left on device"),
    RuntimeError("view size is not compatible with input tensor's size: memory format"),
    IndexError("index out of range in self"),
    ValueError("the memory of this process"),
    ValueError("the GPU is lost on me"),
    ImportError("FlashAttention2 has been toggled on, but it cannot be used"),
]  # fmt: skip


def outcome_of(error: BaseException, *, on_cpu: bool = False, memory: dict[str, Any] = MEMORY) -> OutOfMemory | Failed:
    return classify(error, during="train", on_cpu=on_cpu, **memory)


@pytest.mark.parametrize("error", ON_THE_DEVICE, ids=lambda error: str(error)[:40])
def test_the_device_ran_out(error: Exception) -> None:
    assert outcome_of(error) == OutOfMemory(first_line(error), "device", "train", 70, 80)


@pytest.mark.parametrize("error", ON_THE_HOST, ids=lambda error: str(error)[:40])
def test_the_host_ran_out_which_on_a_cpu_is_the_device(error: Exception) -> None:
    on_gpu, on_cpu = outcome_of(error), outcome_of(error, on_cpu=True)
    assert on_gpu.where == "host"
    assert on_cpu.where == "device"


@pytest.mark.parametrize("error", NEAR_THE_LIMIT_ONLY, ids=lambda error: str(error)[:40])
def test_words_that_mean_it_only_near_the_cap(error: Exception) -> None:
    near = outcome_of(error, memory=NEAR_THE_CAP)
    assert (near.state, near.where) == ("out_of_memory", "host" if isinstance(error, SystemError) else "device")
    assert isinstance(outcome_of(error), Failed)
    assert isinstance(outcome_of(error, memory={}), Failed)


@pytest.mark.parametrize("error", LOOK_ALIKES, ids=lambda error: str(error)[:40])
def test_look_alikes_fail_even_near_the_cap(error: Exception) -> None:
    outcome = outcome_of(error, memory=NEAR_THE_CAP)
    assert outcome.reason == "error"
    assert outcome.during == "train"
    assert str(error) in outcome.message


LOST_DEVICE = [
    RuntimeError(
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"
    ),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
    RuntimeError("No CUDA GPUs: no CUDA-capable device is detected"),
    RuntimeError("CUDA error: unknown error"),
]


@pytest.mark.parametrize("error", LOST_DEVICE, ids=lambda error: str(error)[:40])
def test_the_device_was_lost(error: Exception) -> None:
    for seen in (error, raised_from(RuntimeError("backward failed"), error)):
        outcome = outcome_of(seen)
        assert (outcome.reason, outcome.during) == ("device_lost", "train")
        assert str(error) in outcome.traceback


def raised_from(error: Exception, cause: Exception) -> Exception:
    """``error`` as it comes out of ``raise error from cause``, with a traceback."""
    try:
        raise error from cause
    except Exception as caught:
        return caught


def test_what_an_error_was_raised_from_counts() -> None:
    wrapped = raised_from(RuntimeError("backward failed"), ON_THE_DEVICE[0])
    outcome = outcome_of(wrapped)
    assert isinstance(outcome, OutOfMemory)
    assert outcome.message.startswith("OutOfMemoryError: CUDA out of memory")


def test_a_failure_keeps_its_traceback_with_causes() -> None:
    outcome = outcome_of(raised_from(ValueError("the effect"), KeyError("the cause")))
    assert isinstance(outcome, Failed)
    assert outcome.message == "ValueError: the effect"
    for words in ("the effect", "the cause", __file__, "raise error from cause"):
        assert words in outcome.traceback


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert isinstance(outcome_of(first), Failed)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (MemoryError(), "MemoryError"),
        (ValueError("\n\n  indented"), "ValueError: indented"),
    ],
)
def test_first_line(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_a_long_first_line_says_that_it_was_cut() -> None:
    assert first_line(ValueError("x" * 288)) == f"ValueError: {'x' * 288}"
    assert first_line(ValueError("x" * 289)) == f"ValueError: {'x' * 287}…"


def test_the_last_line_of_an_nccl_error_is_told() -> None:
    said = "NCCL error in: NCCLUtils.cpp:94, unhandled system error\nLast error:\nError while creating shared memory"
    outcome = outcome_of(RuntimeError(said))
    assert outcome.message.endswith("unhandled system error Last error: Error while creating shared memory")
