"""Adapt private names of torch, its fake tensors among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

from autotune.worker.wrapping import after, around, before


def set_allocator_settings(settings: str) -> None:
    """Apply settings to CUDA's caching allocator like ``PYTORCH_ALLOC_CONF``, before any allocation."""
    native: Any = torch._C
    native._accelerator_setAllocatorSettings(settings)


@contextlib.contextmanager
def cuda_answers(answers: Mapping[str, Any]) -> Iterator[None]:
    """Make functions of ``torch.cuda`` return fixed answers within the block.

    Code may keep a replaced function for later, as torch._dynamo does; it behaves like the original after the block.
    """
    real = {name: getattr(torch.cuda, name) for name in answers}
    is_over = False
    for name, answer in answers.items():
        setattr(torch.cuda, name, _fixed_answer(answer, real[name], lambda: is_over))
    try:
        yield
    finally:
        is_over = True
        for name, function in real.items():
            setattr(torch.cuda, name, function)


def _fixed_answer(answer: Any, real: Callable[..., Any], is_over: Callable[[], bool]) -> Callable[..., Any]:
    """Return a function that returns ``answer`` until ``is_over()``, and calls ``real`` from then on."""
    return lambda *args, **kwargs: real(*args, **kwargs) if is_over() else answer


def around_batches(act: Callable[[Callable[[Any], Any], Any, Any], Any]) -> None:
    """Have ``act`` return each batch of any ``DataLoader``, given the original ``__next__``, iterator and dataset."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    around(_BaseDataLoaderIter, "__next__", lambda give, batches: act(give, batches, batches._dataset))


# Fake tensors


def fake_tensor_mode() -> Any:
    """Return a mode of tensors with shapes but no values, which may be mixed with real tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def join_fake_ranks(ranks: int, shard_size: int | None = None) -> Any:
    """Join a fake process group of ``ranks`` as rank 0, and return its device mesh.

    The mesh has one dimension, or with ``shard_size`` two: groups that each have a whole model, and the ``shard_size``
    ranks of a group. The collectives exchange nothing, and the other ranks need not exist. Call this before a fake
    tensor mode is entered, since a mesh reads values.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import _disable_current_modes

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    if shard_size is None:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))

    # FSDP takes one dimension of the mesh within a fake tensor mode, in which the mesh could not read values.
    def without_modes(function: Callable[..., Any], *args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    around(DeviceMesh, "__getitem__", without_modes)
    return init_device_mesh("cpu", (ranks // shard_size, shard_size), mesh_dim_names=("dp_replicate", "dp_shard"))


def start_sharding(model: Any) -> None:
    """Initialize FSDP2 as a sharded model's first forward pass does; torch raises where it cannot shard the model."""
    model._get_fsdp_state()._lazy_init()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


_resize = torch.UntypedStorage.resize_


def on_resize(resized: Callable[[torch.UntypedStorage], None]) -> None:
    """Call ``resized`` with every storage that is resized in place from now on; an earlier callback is replaced."""
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    after(torch.UntypedStorage, "resize_", lambda _, storage, *__: resized(storage))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_in_autograd() -> bool:
    """Return whether this thread is running a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def packs_saved_tensors() -> bool:
    """Return whether hooks on the tensors that autograd saves are active, such as those of checkpointing."""
    native: Any = torch._C._autograd
    return bool(native._top_saved_tensors_default_hooks(False))


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another."""
    return tensor._base is not None


def without_cpu_autocast() -> Any:
    """Return a context without CPU autocast."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def replace_attention(attention: Callable[..., torch.Tensor]) -> None:
    """Replace ``scaled_dot_product_attention`` in this process, under all its names."""
    functional.scaled_dot_product_attention = attention
    torch._C._nn.scaled_dot_product_attention = attention


def forget_optimizer_hooks() -> None:
    """Remove every global hook around optimizer steps."""
    from torch.optim import optimizer

    optimizer._global_optimizer_pre_hooks.clear()
    optimizer._global_optimizer_post_hooks.clear()


def on_checkpoint(called: Callable[[], None]) -> None:
    """Call ``called`` whenever ``torch.utils.checkpoint`` runs a function that it recomputes later."""
    import torch.utils.checkpoint as module

    # ``checkpoint`` itself may already be imported by name, so its inner calls are wrapped.
    before(module, "_checkpoint_without_reentrant_generator", lambda *_, **__: called())
    before(module.CheckpointFunction, "apply", lambda *_, **__: called())


_CPU = torch.device("cpu")


def without_dispatch() -> Any:
    """Return a context without dispatch modes, in which a fake tensor acts as its ``meta`` tensor."""
    return torch._C._DisableTorchDispatch()


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain fake one: no known values, and ``requires_grad`` is not set.

    Such a tensor is not sparse, complex or quantized, no negated view, and of no subclass of ``FakeTensor``.
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
    """Return a fake CPU tensor made of a ``meta`` tensor and the attributes (``vars``) of another fake tensor."""
    # As the constructor of ``FakeTensor`` does, without its checks, which take most of the time.
    fake = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(attributes)
    return fake
