"""Have something hold while a ``Trainer`` trains, evaluations in between included, and be put back afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Trainer

from autotune.training.errors import SettingUnavailableError


def during_training(trainer: Trainer, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Have each training of a ``Trainer`` run within a context, however it ends."""
    trains = trainer._inner_training_loop

    @functools.wraps(trains)
    def trains_within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return trains(*args, **kwargs)

    trainer._inner_training_loop = trains_within


@contextlib.contextmanager
def _no_cudnn_attention() -> Iterator[None]:
    was_on = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


def leave_out_cudnn_attention(trainer: Trainer) -> None:
    """Have ``scaled_dot_product_attention`` use other kernels than cuDNN's while a ``Trainer`` trains.

    cuDNN compiles kernels for each new shape: 0.1 s for each length of bert-base's batches, and 0.12 s for
    Qwen2.5-0.5B's (H100, torch 2.11.0, 25 November 2026). Raises ``SettingUnavailableError`` without a GPU.
    """
    if trainer.args.device.type != "cuda":
        raise SettingUnavailableError(f"{trainer.args.device} has no attention of cuDNN")
    during_training(trainer, _no_cudnn_attention)
