"""Measure the GPU memory that a training process holds outside its allocator: the CUDA context with its kernels."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as functional

from autotune.devices import nvml
from autotune.devices.gpus import MOST_CONTEXT_BYTES

# A small transformer layer. Kernels are chosen by shape, so it must not be too small either.
_WIDTH = 512
_HEADS = 8
_TOKENS = 128
_SAMPLES = 4
_VOCABULARY = 1024


def context_bytes(uuid: str, *, convolves: bool) -> int:
    """Measure how much device memory this process takes when it trains, less what its allocator reserves.

    The process trains, since CUDA loads kernels and libraries allocate memory when they are first used: a
    context without that is 130 to 150 MiB smaller than a trial's (H200, torch 2.11). Returns 0 where NVML gives no
    figure.
    """
    before = nvml.device_used_bytes(uuid)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    # Where the layer does not fit, or an operation is missing, the context is measured without it.
    with contextlib.suppress(RuntimeError):
        use_kernels(device, convolves=convolves)
    torch.cuda.synchronize()
    measured_bytes = context_beside(uuid, before, torch.cuda.memory_reserved(0))
    torch.cuda.empty_cache()
    return measured_bytes or 0


def context_beside(
    uuid: str, used_before_bytes: int | None, reserved_bytes: int, *, is_alone: bool = True
) -> int | None:
    """Return the memory that this process uses on a GPU beside what its allocator reserved; ``None`` if not known.

    NVML does not report memory by process everywhere (containers hide process ids). Where it does not, the growth of
    all memory in use since a reading before CUDA started counts, with what a desktop or a neighbour took meanwhile. So
    it counts up to the largest context only, unless this is one of several ranks: their libraries take more.
    """
    own_bytes = nvml.own_used_bytes(uuid)
    # In a container, the number of another process of the host may be this one's.
    if own_bytes is not None and own_bytes > reserved_bytes:
        return own_bytes - reserved_bytes
    used_bytes = nvml.device_used_bytes(uuid)
    if used_bytes is None or used_before_bytes is None:
        return None
    grown_bytes = max(0, used_bytes - used_before_bytes - reserved_bytes)
    return min(grown_bytes, MOST_CONTEXT_BYTES) if is_alone else grown_bytes


def use_kernels(device: torch.device, *, convolves: bool) -> None:
    """Train a small transformer layer for one step in 16 bits, whose kernels take more memory than those of float32.

    On an H200 a trial held 767 MiB in bf16 and 751 MiB in tf32. Each further precision would take another second here.
    """
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, activation="gelu", batch_first=True)
    parts = torch.nn.ModuleList([torch.nn.Embedding(_VOCABULARY, _WIDTH), layer, torch.nn.Linear(_WIDTH, _VOCABULARY)])
    if convolves:
        parts.append(torch.nn.Conv2d(3, _WIDTH, 16, 16))
    model = parts.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros((_SAMPLES, _TOKENS), dtype=torch.int64, device=device)
    # The precision that a trial may use: bfloat16 arithmetic from compute capability 8.0 (CUDA C++ Programming Guide).
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    with torch.autocast(device.type, torch.bfloat16 if has_bf16 else torch.float16):
        hidden = model[0](tokens)
        if convolves:
            images = torch.zeros((_SAMPLES, 3, 224, 224), device=device)
            hidden = hidden + model[3](images).flatten(2).transpose(1, 2)[:, :_TOKENS]
        logits = model[2](model[1](hidden))
    loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
