"""Have something hold while a ``Trainer`` trains, evaluations in between included, and be put back afterwards.

So are attention masks left out that mask nothing, and cuDNN's attention.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer, masking_utils

from autotune.training.batches import change_batches
from autotune.training.errors import SettingUnavailableError


def during_training(trainer: Trainer, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Make each training of a ``Trainer`` run within a context manager."""
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
    """Make ``scaled_dot_product_attention`` avoid cuDNN's kernels while a ``Trainer`` trains.

    cuDNN compiles kernels for each new shape: 0.1 s for each length of bert-base's batches, and 0.12 s for
    Qwen2.5-0.5B's (H100, torch 2.11.0, 25 November 2026). Raises ``SettingUnavailableError`` without a GPU.
    """
    if trainer.args.device.type != "cuda":
        raise SettingUnavailableError(f"{trainer.args.device} has no attention of cuDNN")
    during_training(trainer, _no_cudnn_attention)


_MASKS = ("attention_mask", "decoder_attention_mask")
_POSITIONS = "position_ids"


def without_full_masks(batch: Any) -> Any:
    """Return a batch without its attention masks, unless a mask marks padding.

    Its tensors are in the host's memory, so that reading them costs the GPU nothing. Raises ``SettingUnavailableError``
    for a batch with several samples in a row.
    """
    if not isinstance(batch, Mapping):
        return batch
    if _POSITIONS in batch:
        raise SettingUnavailableError(
            f"a batch has {_POSITIONS}, so that its samples may be packed; train without unpadded"
        )
    masks = [name for name in _MASKS if isinstance(batch.get(name), torch.Tensor)]
    if not all(bool(batch[name].all()) for name in masks):
        return batch
    return {name: value for name, value in batch.items() if name not in masks}


@contextlib.contextmanager
def _looking_for_no_packed_samples() -> Iterator[None]:
    """Keep transformers from searching for packed samples where there is no mask."""
    asked = is_tracing, _ = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
    # As transformers does by itself since 5.23 where there is no mask.
    masking_utils.is_tracing = lambda tensor=None: tensor is not None and is_tracing(tensor)
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.is_tracing, masking_utils.find_packed_sequence_indices = asked


def leave_out_full_masks(trainer: Trainer) -> None:
    """Make a ``Trainer`` pass no attention mask with batches without padding.

    A mask of ones costs a check in each step, for which the host waits. While a model is compiled or captured as a
    graph it costs more: transformers cannot read the mask's values then, and makes it explicit, with which
    ``scaled_dot_product_attention`` loses its fast kernels. The same happens to models without a mask: a causal model
    might get several samples in one row, which only the values of their positions would tell, and before transformers
    5.23 others got a mask of ones, too, while they were captured (a ViT-large took twice as long; H200, 23 November
    2026).

    Training raises ``SettingUnavailableError`` for batches with several samples in a row.
    """
    change_batches(trainer, without_full_masks)
    # However it ends: a training after it may have packed samples.
    during_training(trainer, _looking_for_no_packed_samples)
