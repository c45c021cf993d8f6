"""Leave out attention masks that mask nothing.

A mask of ones costs a check in each step, for which the host waits. While a model is compiled or captured as a graph it
costs more: transformers cannot look at the mask's values then, and makes it explicit, with which
``scaled_dot_product_attention`` loses its fast kernels. The same happens to models without a mask: a causal one might
be given several samples in one row, which only the values of their positions would tell, and before transformers 5.23
others got a mask of ones, too, while they were captured (a ViT-large took twice as long; H200, 23 November 2026).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer, masking_utils

from autotune.training.batches import change_batches
from autotune.training.during import during_training
from autotune.training.errors import SettingUnavailableError

_MASKS = ("attention_mask", "decoder_attention_mask")
_POSITIONS = "position_ids"


def without_full_masks(batch: Any) -> Any:
    """Return a batch without masks, or with all of them where one masks padding.

    Its tensors are in the host's memory, so that looking at them costs the GPU nothing. Raises
    ``SettingUnavailableError`` for a batch several of whose samples share a row.
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

    Training raises ``SettingUnavailableError`` for batches several of whose samples share a row.
    """
    change_batches(trainer, without_full_masks)
    # However it ends: a training after it may have packed samples.
    during_training(trainer, _looking_for_no_packed_samples)
