"""Reach the names of transformers that are not part of its documented interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer

_INTEGRATIONS = "transformers.integrations."


class OrderedTrainer(Trainer):  # type: ignore[misc]
    """The real ``Trainer`` and its data loader, with samples in the order that ``train_order`` gives."""

    train_order: Sampler[int]

    def _get_train_sampler(self, *_: Any, **__: Any) -> Sampler[int]:
        return self.train_order


def length_grouped_order(lengths: Sequence[int], step_samples: int, seed: int) -> list[int]:
    """Order samples as the Trainer does with ``train_sampling_strategy=group_by_length``."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(seed)
    return list(LengthGroupedSampler(step_samples, lengths=list(lengths), generator=generator))


def is_reporting(callback_class: type) -> bool:
    """Return whether a class of callbacks is one of those with which transformers reports to other services."""
    return any(kind.__module__.startswith(_INTEGRATIONS) for kind in callback_class.__mro__)


def mean_train_loss(trainer: Any) -> float | None:
    """Return the mean loss of the steps since training began; ``None`` where the Trainer does not keep their sum."""
    total = getattr(trainer, "_tr_loss", None)
    return None if total is None else float(total) / max(1, trainer.state.global_step)


def class_for_config(auto_class: Any, config: Any) -> Any:
    """Look up the class that an ``AutoModelFor…`` builds from a config; ``KeyError`` where it has none."""
    return auto_class._model_mapping[type(config)]


def attention_implementations(model_class: type) -> list[str]:
    """List the implementations of attention that a model class says it supports."""
    names = ["eager"]
    if getattr(model_class, "_supports_sdpa", False):
        names.append("sdpa")
    # The second name is that of transformers before 4.53, which code of the user's may still set.
    if getattr(model_class, "_supports_flash_attn", False) or getattr(model_class, "_supports_flash_attn_2", False):
        names.append("flash_attention_2")
    if getattr(model_class, "_supports_flex_attn", False):
        names.append("flex_attention")
    return names


def attention_of(config: Any) -> str:
    """Return the implementation of attention that a built model's config names; ``eager`` where it names none."""
    attention = getattr(config, "_attn_implementation", None)
    return attention if isinstance(attention, str) else "eager"


def optimizer_names() -> list[str]:
    """List the values that ``TrainingArguments.optim`` may have."""
    from transformers.training_args import OptimizerNames

    return sorted(name.value for name in OptimizerNames)


def optimizer_class(arguments: Any, model: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class and the settings of the optimizer that the Trainer would make for these arguments."""
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    return kind, options


# Whether sdpa can do without a mask; absent from a transformers that asks in other words.
_MASK_QUESTIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_questions: dict[str, Callable[..., bool]] = {}


def decide_masks_without_values(*, padded: bool) -> None:
    """Have transformers decide about attention masks without looking at values, for the rest of this process.

    Samples are never packed. Masks are full unless samples are ``padded``: such a mask is dropped in a real step.
    """
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    for name in _MASK_QUESTIONS:
        if hasattr(masking_utils, name):
            question = _questions.setdefault(name, getattr(masking_utils, name))
            setattr(masking_utils, name, question if padded else _without_padding(question))


def _without_padding(ignore: Callable[..., bool]) -> Callable[..., bool]:
    """Ask the same of a mask that masks nothing, such as a decoder makes for itself."""

    def answer(padding_mask: torch.Tensor | None, *rest: Any, **named: Any) -> bool:
        return ignore(None, *rest, **named)

    return answer
