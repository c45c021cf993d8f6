"""Checkpoint only some of a model's layers.

Checkpointing drops a layer's activations after the forward pass and computes them again in the backward pass. A layer
that is left out keeps them. Memory between none and all layers is what a GPU with some memory left has to offer.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from transformers import Trainer, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer


def flagged_within_layers(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules within a layer that checkpoints which have its flag, too, and do not checkpoint themselves.

    The attention of T5 and of its relatives is such a module (transformers 5.23).
    """
    return {
        module
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        for module in layer.modules()
        if hasattr(module, "gradient_checkpointing") and not isinstance(module, GradientCheckpointingLayer)
    }


def checkpoint_layers(model: torch.nn.Module, count: int) -> int:
    """Leave checkpointing on in ``count`` layers of those that have it on, evenly spread; return how many had it.

    Layers are those of ``transformers.modeling_layers.GradientCheckpointingLayer``, or whatever else has the attribute
    ``gradient_checkpointing`` and a function to checkpoint with. Raises ``ValueError`` where there are fewer.
    """
    flagged = {module for module in model.modules() if hasattr(module, "gradient_checkpointing")}
    flagged -= flagged_within_layers(model)
    layers = [
        module
        for module in model.modules()
        # A model's own flag says whether its layers may; what checkpoints holds nothing that does.
        if getattr(module, "gradient_checkpointing", False) is True
        and flagged.intersection(module.modules()) == {module}
    ]
    if not 0 < count <= len(layers):
        raise ValueError(f"{count} of {len(layers)} checkpointed layers: name 1 to {len(layers)}")
    for place, layer in enumerate(layers):
        # Floor of the share up to here grows by one exactly ``count`` times.
        is_on = (place + 1) * count // len(layers) > place * count // len(layers)
        layer.gradient_checkpointing = is_on  # type: ignore[assignment]
    return len(layers)


class _AtStart(TrainerCallback):  # type: ignore[misc]
    """Leaves layers out once the ``Trainer`` has turned checkpointing on, which it does when training starts."""

    def __init__(self, count: int) -> None:
        self._count = count

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        checkpoint_layers(model, self._count)


def checkpoint_some_layers(trainer: Trainer, count: int) -> None:
    """Have a ``Trainer`` whose arguments turn checkpointing on checkpoint ``count`` layers, evenly spread."""
    trainer.add_callback(_AtStart(count))


def keep_no_casts(trainer: Trainer) -> None:
    """Have autocast cast a weight wherever it is used, in place of keeping the copy until the forward pass ends.

    A layer that recomputes casts its weights once in each pass in either case; a weight that is used more than once in
    a pass is cast more often.
    """
    trainer.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
