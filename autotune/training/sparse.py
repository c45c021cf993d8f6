"""Compute the logits of a masked language model only for the tokens that are predicted.

15 % of the tokens are masked in BERT's pre-training, and only these have a label. The output layers of transformers
compute logits for all tokens nevertheless: 29 % of RoBERTa's arithmetic at 512 tokens. ModernBERT calls
the alternative ``sparse_prediction``. Layers after the encoder work on each token by itself, so that they give the same
logits of fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer

from autotune.training.batches import (
    IGNORED,
    SettingUnavailableError,
    change_batches,
    check_loss_is_models,
    check_undivided,
    in_evaluation_mode,
    undone_on_error,
    without_adapters,
    wrap_forward,
)

POSITIONS = "predicted_positions"
"""What a batch calls the positions of its tokens with a label, counted over all samples."""

# Batches have as many positions as the next sixteenth of their tokens, some of them without a label, so that most
# batches have one shape: kernels are chosen, memory is reserved and CUDA graphs are captured once. A choice.
_SHARES = 16
# Largest difference of logits, as a share of the largest: those of fewer tokens may come from another kernel. A choice.
_ALIKE = 0.05


def positions_to_compute(tokens: int, labelled: int) -> int:
    """Return the number of tokens to compute logits for: the labelled ones, rounded up to have few shapes."""
    share = -(-tokens // _SHARES)
    return min(tokens, max(1, -(-labelled // share)) * share)


def with_positions(batch: Any) -> Any:
    """Return a batch with ``predicted_positions``: tokens with a label, then others up to ``positions_to_compute``.

    A batch without labels is left as it is. Raises ``SettingUnavailableError`` for labels that are not one a token.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None:
        return batch
    if labels.shape != getattr(batch.get("input_ids"), "shape", None):
        raise SettingUnavailableError("a batch has no label for each token; train without sparse_prediction")
    is_labelled = labels.reshape(-1) != IGNORED
    first, others = is_labelled.nonzero(), (~is_labelled).nonzero()
    count = positions_to_compute(len(is_labelled), len(first))
    return {**batch, POSITIONS: torch.cat((first, others)).reshape(-1)[:count]}


class _Chosen:
    """Passes only some tokens of an encoder's output on to the layers after it; all while ``positions`` is ``None``."""

    positions: torch.Tensor | None = None

    def after_encoder(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the encoder's output with the hidden states of the chosen tokens only: (1, positions, size)."""
        if self.positions is None:
            return output
        hidden = output[0]
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.positions)[None]
        if isinstance(output, tuple):
            return (chosen, *output[1:])
        output.last_hidden_state = chosen
        return output


def predict_chosen_tokens(model: Any) -> Callable[[], None]:
    """Make a masked language model compute logits for ``predicted_positions`` only; return the undo function.

    Its loss is the same, since tokens without a label have no part in it. It returns logits (1, positions, vocabulary).
    """
    model = without_adapters(model)
    model._chosen_tokens = chosen = _Chosen()
    hook = model.base_model.register_forward_hook(chosen.after_encoder)

    def forward(model: Any, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        positions = kwargs.pop(POSITIONS, None)
        labels = kwargs.get("labels")
        if positions is None or labels is None or not torch.is_grad_enabled():
            return whole(model, *args, **kwargs)
        kwargs["labels"] = labels.reshape(-1).index_select(0, positions)[None]
        model._chosen_tokens.positions = positions
        try:
            return whole(model, *args, **kwargs)
        finally:
            model._chosen_tokens.positions = None

    unwrap = wrap_forward(model, forward)

    def undo() -> None:
        hook.remove()
        del model._chosen_tokens
        unwrap()

    return undo


def predict_labelled_tokens(trainer: Trainer) -> None:
    """Make a ``Trainer`` of a masked language model compute logits only for tokens with a label.

    Evaluations compute all logits. Raises ``SettingUnavailableError`` for another kind of model, for a model in which a
    token's logits depend on the choice of tokens, for another loss of the ``Trainer``, and as ``check_undivided`` does.
    """
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    name = type(model).__name__
    check_loss_is_models(trainer)
    if not name.endswith("ForMaskedLM") or model.base_model is model or not hasattr(model.forward, "__func__"):
        raise SettingUnavailableError(f"{name} is no masked language model with an encoder of its own")
    check_undivided(trainer)
    undo = predict_chosen_tokens(model)
    if not next(model.parameters()).is_meta:
        with undone_on_error(undo, f"{name} does not compute some tokens alone"), trainer.accelerator.autocast():
            if not _is_alike(model):
                raise SettingUnavailableError(
                    f"the logits of {name} are other ones where only some tokens are predicted"
                )
    change_batches(trainer, with_positions)


def _is_alike(model: Any) -> bool:
    """Return whether a model gives some tokens the same logits alone (``some``) as among all tokens (``every``)."""
    words, device = model.get_input_embeddings().num_embeddings, next(model.parameters()).device
    tokens = torch.arange(8, device=device).reshape(2, 4) % words
    positions = torch.tensor([6, 1], device=device)
    with in_evaluation_mode(model):
        with torch.enable_grad():
            some = model.forward(input_ids=tokens, labels=tokens, predicted_positions=positions).logits.detach()
        with torch.no_grad():
            every = model.forward(input_ids=tokens).logits
    if some.shape != (1, 2, every.shape[-1]):
        return False
    expected = every.reshape(-1, every.shape[-1])[positions]
    return bool((some[0] - expected).abs().max() <= _ALIKE * expected.abs().max())
