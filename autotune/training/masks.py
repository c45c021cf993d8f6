"""Leave out attention masks that mask nothing.

A mask of ones costs a check in each step, for which the host waits. While a model is compiled or captured as a graph it
costs more: transformers cannot look at the mask's values then, and makes it explicit, with which
``scaled_dot_product_attention`` loses its fast kernels. The same happens to models without a mask: a causal one might
be given several samples in one row, which only the values of their positions would tell, and before transformers 5.23
others got a mask of ones, too, while they were captured (a ViT-large took twice as long; H200, 23 November 2026).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer, masking_utils

from autotune.training.errors import SettingUnavailableError

_MASKS = ("attention_mask", "decoder_attention_mask")
_POSITIONS = "position_ids"


class WithoutFullMasks:
    """Makes batches as another collator does, without masks that mask nothing."""

    def __init__(self, collator: Callable[..., Any]) -> None:
        self._collator = collator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a batch without masks, or with all of them where one masks padding.

        Its tensors are in the host's memory, so that looking at them costs the GPU nothing. Raises
        ``SettingUnavailableError`` for a batch several of whose samples share a row.
        """
        batch = self._collator(*args, **kwargs)
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
    """Keep transformers from looking for packed samples where there is no mask."""
    asked = is_tracing, _ = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
    # As transformers does by itself since 5.23 where there is no mask.
    masking_utils.is_tracing = lambda tensor=None: tensor is not None and is_tracing(tensor)
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.is_tracing, masking_utils.find_packed_sequence_indices = asked


def leave_out_full_masks(trainer: Trainer) -> None:
    """Have a ``Trainer`` pass no attention mask with batches in which no sample is padded.

    Raises ``SettingUnavailableError`` for one that makes batches in a way of its own: they might be packed.
    """
    if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:
        raise SettingUnavailableError(
            f"{type(trainer).__name__}.get_train_dataloader is your own; whether its batches need a mask is not known"
        )
    trainer.data_collator = WithoutFullMasks(trainer.data_collator)
    trains = trainer._inner_training_loop

    @functools.wraps(trains)
    def trains_without_masks(*args: Any, **kwargs: Any) -> Any:
        # However it ends: a training after it may have packed samples.
        with _looking_for_no_packed_samples():
            return trains(*args, **kwargs)

    trainer._inner_training_loop = trains_without_masks
