"""Have a loss divided by the accumulation where neither the model nor the ``Trainer`` would.

The ``Trainer`` leaves the division to every model whose ``forward`` takes any keyword, since it may divide by
``num_items_in_batch``. BERT, T5 and others take it and ignore it: with transformers 5.23 accumulating 8 micro-batches
has 8 times the loss and gradients of one batch of as many samples.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import Trainer

# A loss that is divided by twice the number is half as large, but for terms beside it, such as those of routers.
_UNUSED = 0.1


def divide_by_accumulation(trainer: Trainer) -> None:
    """Have a ``Trainer`` look at its first micro-batch, whether the loss depends on ``num_items_in_batch``.

    Where it does not, ``model_accepts_loss_kwargs`` becomes ``False``, so that the Trainer divides; then
    ``divides_by_accumulation`` of it is true.
    """
    if trainer.args.gradient_accumulation_steps == 1 or not getattr(trainer, "model_accepts_loss_kwargs", False):
        return
    fetch: Any = trainer.get_batch_samples

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        fetched = fetch(*args, **kwargs)
        del trainer.get_batch_samples
        if trainer.compute_loss_func is None and fetched[0] and fetched[1] is not None:
            trainer.divides_by_accumulation = not _depends_on_items(trainer, *fetched)
            if trainer.divides_by_accumulation:
                trainer.model_accepts_loss_kwargs = False
        return fetched

    trainer.get_batch_samples = get_batch_samples


@torch.no_grad()
def _depends_on_items(trainer: Any, batches: list[Any], items: Any) -> bool:
    """Return whether the loss is another one where it is told of twice as many items; ``True`` where that fails."""
    model = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
    modes = [(module, module.training) for module in model.modules()]
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(devices), trainer.compute_loss_context_manager():
            losses = []
            for count in (items, 2 * items):
                # Whatever prepares or takes inputs may change them.
                inputs = pytree.tree_map(lambda each: each.clone() if torch.is_tensor(each) else each, batches[0])
                inputs = trainer._prepare_inputs(copy.copy(inputs))
                losses.append(float(trainer.compute_loss(model, inputs, num_items_in_batch=count)))
    except Exception:
        return True
    finally:
        for module, mode in modes:
            module.training = mode
    return abs(losses[1] - losses[0]) > _UNUSED * abs(losses[0])
