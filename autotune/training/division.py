"""Have a loss divided by the accumulation where neither the model nor the ``Trainer`` would.

The ``Trainer`` leaves the division to every model whose ``forward`` takes any keyword, since it may divide by
``num_items_in_batch``. BERT, T5 and others take it and ignore it: with transformers 5.23 accumulating 8 micro-batches
has 8 times the loss and gradients of one batch of as many samples.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import Trainer


def divide_by_accumulation(trainer: Trainer) -> None:
    """Make a ``Trainer`` check in its first micro-step whether the loss depends on ``num_items_in_batch``.

    Where it does not, ``model_accepts_loss_kwargs`` becomes ``False`` in time for this micro-step, so that the Trainer
    divides the loss; its ``divides_by_accumulation`` is then true. A model that is compiled as a whole runs this
    micro-step without the compiler.
    """
    accepts, accumulates = (
        trainer.__dict__.get("model_accepts_loss_kwargs"),
        trainer.args.gradient_accumulation_steps > 1,
    )
    own = trainer.__dict__.get("compute_loss")
    if not (accepts and accumulates):
        return
    trainer.compute_loss = _FirstLoss(trainer, own)


def withdraw_division(trainer: Trainer) -> None:
    """Undo ``divide_by_accumulation`` on a ``Trainer`` that has not trained since."""
    waiting = trainer.__dict__.get("compute_loss")
    if isinstance(waiting, _FirstLoss):
        waiting.withdraw()


class _FirstLoss:
    """Takes the place of ``compute_loss`` until it has computed a loss of the training."""

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer, self._own = trainer, own
        self._compute = trainer.compute_loss

    def withdraw(self) -> None:
        """Restore the Trainer's own ``compute_loss``."""
        if self._own is None:
            del self._trainer.compute_loss
        else:
            self._trainer.compute_loss = self._own

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """Return the loss, and check by its autograd graph whether it depends on the number of items."""
        trainer = self._trainer
        if num_items_in_batch is None or not torch.is_grad_enabled():
            return self._compute(*args, num_items_in_batch=num_items_in_batch, **kwargs)
        self.withdraw()
        items = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=trainer.args.device).detach().clone()
        items.requires_grad_()
        # The loss does not show through a model that is compiled as a whole. Layers that are compiled stay so: what a
        # checkpoint recomputes must be what was computed.
        layers = set(trainer.model.modules()) - {trainer.model}
        is_by_layer = any(layer._compiled_call_impl is not None for layer in layers)
        with nullcontext() if is_by_layer else torch.compiler.set_stance("force_eager"):
            computed = self._compute(*args, num_items_in_batch=items, **kwargs)
        loss = computed[0] if isinstance(computed, tuple) else computed
        trainer.divides_by_accumulation = trainer.compute_loss_func is None and not _depends_on(loss, items)
        if trainer.divides_by_accumulation:
            trainer.model_accepts_loss_kwargs = False
        return computed


def _depends_on(loss: torch.Tensor, number: torch.Tensor) -> bool:
    """Return whether the autograd graph of a loss contains a tensor."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is number:
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False
