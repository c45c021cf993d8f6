"""Change the batches that a ``Trainer`` loads for training, and how attention is computed while it trains.

A batch of a length that did not occur before costs host time, and compiled code and CUDA graphs are for one shape each.
Padded to a multiple of some tokens, batches have few lengths. Padding is masked, so that the loss is the same.

Attention masks that mask nothing, and cuDNN's attention kernels, can be left out as well.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    masking_utils,
)


class SettingUnavailableError(RuntimeError):
    """A training cannot have a setting; the message says which and why."""


def without_adapters(model: Any) -> Any:
    """Return the transformers model within peft's wrapper, or the model itself where it has no adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def wrap_forward(model: Any, act: Callable[..., Any]) -> Callable[[], None]:
    """Replace a model's ``forward`` by ``act(model, original, *args, **kwargs)``; return the undo function.

    ``original`` is the unbound function, which takes the model as well: a copy of the model is wrapped, too, and
    ``act`` then gets the copy.
    """
    # An earlier wrapper is an attribute of the model; its class has the function otherwise.
    earlier, original = vars(model).get("forward"), model.forward.__func__

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return act(self, original, *args, **kwargs)

    model.forward = types.MethodType(forward, model)

    def undo() -> None:
        del model.forward
        if earlier is not None:
            model.forward = earlier

    return undo


@contextlib.contextmanager
def undone_on_error(undo: Callable[[], None], problem: str) -> Iterator[None]:
    """Call ``undo`` where the block, which tries a model in an unusual way, raises an error.

    An error that may come from this way becomes a ``SettingUnavailableError`` that names ``problem``. Others are
    raised as they are, such as a lack of memory.
    """
    try:
        yield
    except BaseException as error:
        undo()
        is_of_call = isinstance(error, TypeError | ValueError | LookupError | AttributeError | NotImplementedError)
        if is_of_call or type(error) is RuntimeError:
            raise SettingUnavailableError(f"{problem}: {error}") from error
        raise


@contextlib.contextmanager
def in_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Run the block with a model in evaluation mode, so without dropout, and restore its mode."""
    is_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(is_training)


IGNORED = -100
"""The label of a token that does not count: torch.nn.CrossEntropyLoss's default."""

Change = Callable[[Any], Any]
"""Makes another batch of a batch, in the host's memory."""


def stock_settings(trainer: Trainer) -> dict[str, int]:
    """Return the settings by which stock transformers would do what ``apply`` did to a ``Trainer``, to be added to.

    The keys are ``every_n_layers`` of the checkpointing ``kwargs``, and ``pad_to_multiple_of`` of the collator.
    """
    return vars(trainer).setdefault("stock_settings", {})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _ChangingCollator:
    """Makes batches as another collator does, and changes them."""

    collate: Callable[..., Any]
    change: Change

    def __call__(self, samples: Any) -> Any:
        return self.change(self.collate(samples))


@dataclass(frozen=True)
class Loading:
    """Takes the place of ``Trainer.get_train_dataloader``, and has the batches of its loader changed."""

    load: Callable[[], Any]
    change: Change

    def __call__(self) -> Any:
        return change_loader(self.load(), self.change)


def change_loader(loader: Any, change: Change) -> Any:
    """Make a loader apply a change to its batches, once even if called repeatedly, and return it.

    Raises ``SettingUnavailableError`` where it is not a ``DataLoader`` of torch.
    """
    # accelerate's loader takes batches from a loader within.
    base = getattr(loader, "base_dataloader", loader)
    if not callable(getattr(base, "collate_fn", None)):
        raise SettingUnavailableError(f"the training loader is {type(loader).__name__}, which has no collator")
    collate = base.collate_fn
    # Look whether the change is applied already, beneath others.
    while isinstance(collate, _ChangingCollator) and collate.change is not change:
        collate = collate.collate
    if not isinstance(collate, _ChangingCollator):
        loader.collate_fn = base.collate_fn = _ChangingCollator(base.collate_fn, change)
    return loader


def change_batches(trainer: Trainer, change: Change) -> None:
    """Make a ``Trainer`` change each training batch, but no evaluation batch.

    Training raises ``SettingUnavailableError`` where the loader is not a ``DataLoader`` of torch.
    """
    trainer.get_train_dataloader = Loading(trainer.get_train_dataloader, change)


def check_undivided(trainer: Trainer) -> None:
    """Raise ``SettingUnavailableError`` where a batch, whose samples a setting joins, would be divided by samples."""
    dispatches = trainer.accelerator.dispatch_batches
    if dispatches is None:
        # accelerate's default (data_loader.prepare_data_loader), with one process as well.
        dispatches = isinstance(trainer.train_dataset, IterableDataset)
    if dispatches or trainer.args.n_gpu > 1:
        raise SettingUnavailableError(
            "batches are divided by their samples on the way to the model; give accelerator_config "
            "dispatch_batches=False, and train with one process for each GPU"
        )


def check_loss_is_models(trainer: Trainer) -> None:
    """Raise ``SettingUnavailableError`` where a ``Trainer`` itself computes the loss, which takes all logits."""
    if trainer.args.label_smoothing_factor or trainer.compute_loss_func is not None:
        raise SettingUnavailableError("the Trainer computes the loss from logits (label smoothing or a loss of yours)")


def longest_position(model: Any) -> int | None:
    """Return the number of positions of a model; ``None`` where its config does not have it."""
    config = getattr(without_adapters(model), "config", None)
    if config is None:
        return None
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def padding_value(trainer: Trainer) -> int:
    """Return the padding token of a ``Trainer``'s tokenizer, else that of its model's config, else 0."""
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    for source in (trainer.processing_class, getattr(model, "config", None)):
        token = getattr(source, "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    return 0


@dataclass(frozen=True)
class PaddedToMultiple:
    """Pads a batch on the right until its tokens are a multiple of a number; a seq2seq model's targets likewise.

    ``pad`` is the padding token. No batch is padded beyond ``longest``, the number of positions of the model.
    """

    multiple: int
    pad: int = 0
    longest: int | None = None
    has_decoder: bool = False

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Return the batch with tensors (samples, tokens) padded to the multiple.

        Raises ``SettingUnavailableError`` for a batch in which more padding would not be masked.
        """
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        ids = batch.get("input_ids") if mask is not None else None
        if mask is None or ids is None or ids.ndim != 2 or mask.shape != ids.shape:
            raise SettingUnavailableError("a batch has no input_ids with an attention_mask, which would hide padding")
        if not bool(mask[:, 0].all()):
            raise SettingUnavailableError("a batch is padded on the left, where more padding moves its tokens")
        return {name: self._padded(name, value, ids) for name, value in batch.items()}

    def _padded(self, name: str, value: Any, ids: torch.Tensor) -> Any:
        """Return a field of a batch, padded if it has a value for each token."""
        of_decoder = name.startswith("decoder_") or (name == "labels" and self.has_decoder)
        is_text = isinstance(value, torch.Tensor) and value.ndim == 2 and len(value) == len(ids)
        if not is_text or not (of_decoder or value.shape == ids.shape):
            return value
        tokens = value.shape[1]
        wanted = -(-tokens // self.multiple) * self.multiple
        if self.longest is not None:
            wanted = max(tokens, min(wanted, self.longest))
        if wanted == tokens:
            return value
        return functional.pad(value, (0, wanted - tokens), value=self._value(name))

    def _value(self, name: str) -> int:
        """Return the padding value of a field of a batch."""
        if name in ("input_ids", "decoder_input_ids"):
            return self.pad
        if name == "labels":
            return IGNORED
        if name.endswith("mask") or name == "token_type_ids":
            return 0
        raise SettingUnavailableError(f"a batch has {name}, for whose padding there is no value that changes nothing")


def pad_to_multiples(trainer: Trainer, multiple: int) -> None:
    """Make a ``Trainer`` pad training batches to multiples of a number of tokens.

    Raises ``SettingUnavailableError`` for a number below 1; training raises it for batches without a mask.
    """
    if multiple < 1:
        raise SettingUnavailableError(f"length_multiple={multiple} is not a number of tokens; use 1 or more")
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    has_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    longest = longest_position(model)
    if _collator_pads(trainer, multiple, longest):
        stock_settings(trainer)["pad_to_multiple_of"] = multiple
    change_batches(trainer, PaddedToMultiple(multiple, padding_value(trainer), longest, has_decoder=has_decoder))


_COLLATORS = (
    DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorForTokenClassification, DataCollatorWithPadding
)  # fmt: skip


def _collator_pads(trainer: Trainer, multiple: int, longest: int | None) -> bool:
    """Return whether the collator's ``pad_to_multiple_of`` would pad as autotune does, and can be set instead.

    That option has no limit, so it must not pad the longest samples beyond ``longest`` positions.
    """
    collator = trainer.data_collator
    uses_collator = type(trainer).get_train_dataloader is Trainer.get_train_dataloader
    if not uses_collator or type(collator) not in _COLLATORS or multiple % (collator.pad_to_multiple_of or 1):
        return False
    if longest is None:
        return True
    most: int = min(longest, collator.tokenizer.model_max_length)
    return -(-most // multiple) * multiple <= longest


def during_training(trainer: Trainer, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Make each training of a ``Trainer`` run within a new context manager that ``context`` returns."""
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
    for a batch with ``position_ids``, whose rows may have several samples.
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
def _without_search_for_packed_samples() -> Iterator[None]:
    """In the block, keep transformers from looking for packed samples in batches that have no mask."""
    is_tracing, find = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
    # Without a tensor, which is a mask, the answer is no: as in transformers since 5.23.
    masking_utils.is_tracing = lambda tensor=None: tensor is not None and is_tracing(tensor)
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.is_tracing, masking_utils.find_packed_sequence_indices = is_tracing, find


def leave_out_full_masks(trainer: Trainer) -> None:
    """Make a ``Trainer`` pass no attention mask with batches without padding.

    A mask of ones costs a check in each step, for which the host waits. While a model is compiled or captured as a
    graph it costs more: transformers cannot read the mask's values then, and makes it explicit, with which
    ``scaled_dot_product_attention`` loses its fast kernels. The same happens to models without a mask: a causal model
    might get several samples in one row, which only the values of their positions would tell, and before transformers
    5.23 others got a mask of ones, too, while they were captured (a ViT-large took twice as long; H200, 23 November
    2026).

    Training raises ``SettingUnavailableError`` for batches with ``position_ids``, which may have packed rows.
    """
    change_batches(trainer, without_full_masks)
    # Undone however the training ends: a later one may have packed samples.
    during_training(trainer, _without_search_for_packed_samples)
