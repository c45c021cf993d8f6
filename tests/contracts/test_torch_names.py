"""Test the private names of torch that are used, in the installed version."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from autotune.worker.private import torch as names


def test_the_allocator_takes_settings() -> None:
    native: Any = torch._C
    assert callable(native._accelerator_setAllocatorSettings)


def test_cuda_answers_within_the_block_only() -> None:
    real = torch.cuda.get_device_capability
    with names.cuda_answers({"get_device_capability": (9, 0), "current_device": 0}):
        kept = torch.cuda.get_device_capability
        assert torch.cuda.get_device_capability(0) == (9, 0)
        assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability is real
    if not torch.cuda.is_available():
        # What was kept of it is the real thing by now.
        with pytest.raises((AssertionError, RuntimeError)):
            kept(0)


@pytest.mark.parametrize("name", ["get_device_capability", "get_device_properties", "current_device"])
def test_what_is_answered_of_cuda_is_there(name: str) -> None:
    assert callable(getattr(torch.cuda, name))


def test_fake_tensors_have_no_values() -> None:
    with names.fake_tensor_mode():
        made = torch.empty(1 << 20, 1 << 20) @ torch.empty(1 << 20, 8)
    assert made.shape == (1 << 20, 8)
    assert type(made).__name__ == "FakeTensor"


def test_autograd_is_told_apart() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            seen.append(names.is_in_autograd())
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            seen.append(names.is_in_autograd())
            return gradients[0]

    value = torch.ones(2, requires_grad=True)
    Look.apply(value).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [False, True]
    assert not names.is_in_autograd()


def test_hooks_on_saved_tensors_are_known() -> None:
    assert not names.packs_saved_tensors()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        assert names.packs_saved_tensors()
    assert not names.packs_saved_tensors()


def test_views_are_told_apart() -> None:
    whole = torch.ones(4)
    assert names.is_view(whole[:2])
    assert not names.is_view(whole)


def test_autocast_can_be_left_out() -> None:
    one = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (one @ one).dtype == torch.bfloat16
        with names.without_cpu_autocast():
            assert (one @ one).dtype == torch.float32


def test_attention_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (functional, torch._C._nn):
        monkeypatch.setattr(owner, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
    called = []

    def attention(*tensors: torch.Tensor, **_: Any) -> torch.Tensor:
        called.append(threading.current_thread())
        return tensors[0]

    names.replace_attention(attention)
    heads = torch.ones(1, 1, 2, 4)
    assert torch.nn.functional.scaled_dot_product_attention(heads, heads, heads) is heads
    assert torch._C._nn.scaled_dot_product_attention(heads, heads, heads) is heads
    assert len(called) == 2


def test_operations_that_are_followed_exist() -> None:
    for name in (
        "_local_scalar_dense",
        "_safe_softmax",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_softmax_backward_data",
        "native_dropout",
    ):
        assert getattr(torch.ops.aten, name).default


def test_the_profiler_keeps_raw_events() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as taken:
        torch.ones(64, 64) @ torch.ones(64, 64)
    events = taken.profiler.kineto_results.events()  # type: ignore[union-attr]
    assert any("mm" in event.name() for event in events)
    for event in events:
        assert event.device_type().name == "CPU"
        assert not event.is_user_annotation()
        assert event.start_ns() > 0
        assert event.duration_ns() >= 0
