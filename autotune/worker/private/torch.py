"""Reach the names of torch that are not part of its documented interface."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as functional


def set_allocator_settings(settings: str) -> None:
    """Give CUDA's caching allocator settings, as ``PYTORCH_ALLOC_CONF`` would; nothing may be allocated yet."""
    # Newer versions of torch have one function for all accelerators, older ones that of CUDA.
    native: Any = torch._C
    give = (
        getattr(native, "_accelerator_setAllocatorSettings", None)
        or native._cuda_cudaCachingAllocator_set_allocator_settings
    )
    give(settings)


@contextlib.contextmanager
def cuda_answers(answers: Mapping[str, Any]) -> Iterator[None]:
    """Have functions of ``torch.cuda`` give these answers within the block, whatever they are asked.

    What was taken from torch.cuda in the block (torch._dynamo keeps the functions) is the real thing from its end on.
    """
    real = {name: getattr(torch.cuda, name) for name in answers}
    is_over = False
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answering(answer, real[name], lambda: is_over))
    try:
        yield
    finally:
        is_over = True
        for name, function in real.items():
            setattr(torch.cuda, name, function)


def _answering(answer: Any, real: Callable[..., Any], is_over: Callable[[], bool]) -> Callable[..., Any]:
    """Make a function that gives the answer until it is over, and is the real one from then on."""
    return lambda *args, **kwargs: real(*args, **kwargs) if is_over() else answer


# Fake tensors


def fake_tensor_mode() -> Any:
    """Make the mode in which tensors have shapes and no values; real ones may be mixed in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_in_autograd() -> bool:
    """Return whether this thread is autograd's, in the middle of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another."""
    return tensor._base is not None


def without_cpu_autocast() -> Any:
    """Make a context in which autocast on the CPU casts nothing."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def replace_attention(attention: Callable[..., torch.Tensor]) -> None:
    """Have ``scaled_dot_product_attention`` be another function, wherever it is reached from, in this process."""
    functional.scaled_dot_product_attention = attention
    torch._C._nn.scaled_dot_product_attention = attention
