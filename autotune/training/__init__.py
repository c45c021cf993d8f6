"""Settings that make a training faster and have no field in ``TrainingArguments``: one line beside a ``Trainer``.

    from autotune.training import apply
    trainer = apply(Trainer(model=model, args=arguments, …), cuda_graphs=True)
    trainer.train()

A trial applies them by the same function, so that training runs as it was measured.
"""

from __future__ import annotations

from typing import TypeVar

from accelerate.utils import AutocastKwargs
from transformers import Trainer

from autotune.training.batches import SettingUnavailableError as SettingUnavailableError
from autotune.training.batches import leave_out_cudnn_attention, leave_out_full_masks, pad_to_multiples
from autotune.training.graphs import use_cuda_graphs
from autotune.training.layers import checkpoint_some_layers, choose_experts, compile_layers, multiply_in_float8
from autotune.training.loss import divide_by_accumulation, fuse_loss, withdraw_division
from autotune.training.rows import join_samples
from autotune.training.rows import pack as pack
from autotune.training.sparse import predict_labelled_tokens

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def apply(
    trainer: AnyTrainer,
    *,
    regional_compilation: bool = False,
    checkpointed_layers: int | None = None,
    experts_implementation: str | None = None,
    uncached_casts: bool = False,
    length_multiple: int | None = None,
    unpadded: bool = False,
    padding_free: bool = False,
    fused_loss: bool = False,
    sparse_prediction: bool = False,
    cudnn_attention: bool = True,
    float8: bool = False,
    cuda_graphs: bool = False,
) -> AnyTrainer:
    """Apply settings to a ``Trainer`` that has not begun to train, and return it.

    ``regional_compilation``: compile the layers that repeat, each in place, and not the whole model.
    ``checkpointed_layers``: checkpoint so many layers, evenly spread; checkpointing itself is turned on by the
    ``TrainingArguments``. ``experts_implementation``: compute a mixture of experts in the way that transformers calls
    so. ``uncached_casts``: have autocast keep no 16-bit copies of the weights until the end of the forward pass.
    ``length_multiple``: pad batches of text to multiples of so many tokens, so that they have few shapes;
    with ``padding_free``, fill rows to multiples.
    ``unpadded``: pass no attention mask, since no sample is padded. ``padding_free``: put the samples of a batch of a
    causal language model in one row, without padding. ``fused_loss``: compute its loss without all logits.
    ``sparse_prediction``: compute the logits of a masked language model for the tokens with a label alone.
    ``cudnn_attention``: if false, have attention leave out cuDNN's kernels, which are compiled for each new length.
    ``float8``: multiply in FP8 within the layers that repeat, another numeric.
    ``cuda_graphs``: launch each forward and backward pass as one CUDA graph. Raises ``SettingUnavailableError`` where a
    training does not allow one.

    Whatever the settings, a loss is divided by the accumulation, see ``autotune.training.loss``.
    """
    withdraw_division(trainer)
    changes_model = fused_loss or sparse_prediction or float8 or experts_implementation is not None
    if trainer.model_init is not None and changes_model:
        raise SettingUnavailableError("the Trainer makes another model as it starts (model_init); give it the model")
    # Before the positions of tokens in a batch are counted.
    if length_multiple is not None and not padding_free:
        pad_to_multiples(trainer, length_multiple)
    # Before layers are compiled: these try the model on a few tokens, for which they would be compiled as well.
    if sparse_prediction:
        predict_labelled_tokens(trainer)
    if padding_free:
        join_samples(trainer, length_multiple)
    if fused_loss:
        fuse_loss(trainer)
    if float8:
        multiply_in_float8(trainer)
    if regional_compilation:
        compile_layers(trainer, for_any_length=padding_free or length_multiple is not None)
    if checkpointed_layers is not None:
        checkpoint_some_layers(trainer, checkpointed_layers)
    if experts_implementation is not None:
        choose_experts(trainer, experts_implementation)
    if uncached_casts:
        # A layer that recomputes casts its weights once in each pass in either case.
        trainer.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    if unpadded:
        leave_out_full_masks(trainer)
    if not cudnn_attention:
        leave_out_cudnn_attention(trainer)
    if cuda_graphs:
        use_cuda_graphs(trainer)
    divide_by_accumulation(trainer)
    return trainer
