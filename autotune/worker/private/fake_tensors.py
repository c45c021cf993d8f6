"""Adapt private names of torch's fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["FakeTensor", "copy_fake", "is_plain_fake", "without_dispatch"]

_CPU = torch.device("cpu")


def without_dispatch() -> Any:
    """Return a context without dispatch modes, in which fake tensors are their ``meta`` tensors."""
    return torch._C._DisableTorchDispatch()


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Return whether a fake tensor is plain: with only shape, strides and a real dtype, and no gradient.

    Such a tensor has no known values, is not sparse, complex or quantized, and is no negated view.
    """
    return (
        type(tensor) is FakeTensor
        and tensor.constant is None
        and getattr(tensor, "real_tensor", None) is None
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
        and not tensor.is_quantized
        and not tensor.requires_grad
        and not tensor.is_neg()
    )


def copy_fake(meta: torch.Tensor, attributes: Mapping[str, Any]) -> Any:
    """Return a fake CPU tensor for a ``meta`` tensor, with the attributes of another fake tensor.

    Does the same as the class's own constructor, without its checks.
    """
    fake = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(attributes)
    return fake
