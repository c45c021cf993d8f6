"""Adapt private names of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Trainer

from autotune.worker.wrapping import around

_INTEGRATIONS = "transformers.integrations."


def change_train_sampler(trainer: Any, change: Callable[[Callable[[], Any]], Any]) -> None:
    """Make a ``Trainer`` use the sampler that ``change`` returns; ``change`` gets a function for the Trainer's own."""
    around(trainer, "_get_train_sampler", lambda find, *args, **kwargs: change(lambda: find(*args, **kwargs)))


def length_grouped_order(lengths: Sequence[int], step_samples: int, seed: int) -> list[int]:
    """Return the order of samples under ``train_sampling_strategy=group_by_length``, in steps of so many samples."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(seed)
    return list(LengthGroupedSampler(step_samples, lengths=list(lengths), generator=generator))


def remove_reporting_callbacks(trainer: Any) -> None:
    """Remove the callbacks of a ``Trainer`` that are integrations of transformers, which report to other services."""
    for callback in list(trainer.callback_handler.callbacks):
        if any(kind.__module__.startswith(_INTEGRATIONS) for kind in type(callback).__mro__):
            trainer.remove_callback(callback)


def mean_train_loss(trainer: Any) -> float | None:
    """Return the mean loss of a training that logs nothing; ``None`` where the Trainer does not keep the sum."""
    total = getattr(trainer, "_tr_loss", None)
    return None if total is None else float(total) / max(1, trainer.state.global_step)


def class_for_config(auto_class: Any, config: Any) -> Any:
    """Return the class that an ``AutoModelFor…`` uses for a config. Raises ``KeyError`` where there is none."""
    return auto_class._model_mapping[type(config)]


def attention_implementations(model_class: type) -> list[str]:
    """Return the attention implementations that a model class supports."""
    flags = {"sdpa": "sdpa", "flash_attention_2": "flash_attn", "flex_attention": "flex_attn"}
    return ["eager", *(name for name, flag in flags.items() if getattr(model_class, f"_supports_{flag}", False))]


def attention_of(config: Any) -> str:
    """Return the attention implementation of a model's config; ``eager`` where it names none."""
    attention = getattr(config, "_attn_implementation", None)
    return attention if isinstance(attention, str) else "eager"


def modules_not_to_split(model: Any) -> list[str]:
    """Return the module classes that a model declares as not to be split; empty without a declaration."""
    return sorted(getattr(model, "_no_split_modules", None) or [])


def optimizer_names() -> list[str]:
    """Return the possible values of ``TrainingArguments.optim``."""
    from transformers.training_args import OptimizerNames

    return sorted(name.value for name in OptimizerNames)


def optimizer_class(arguments: Any, model: Any) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer class and its keyword arguments that the Trainer uses for these ``TrainingArguments``."""
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    return kind, options


def compute_on_cpu(arguments: Any) -> None:
    """Make ``TrainingArguments`` use the CPU."""
    vars(arguments)["_setup_devices"] = torch.device("cpu")


def take_batch_of_arguments(trainer: Any) -> None:
    """Make a ``Trainer`` use the current batch size of its arguments, of which it keeps a copy."""
    trainer._train_batch_size = trainer.args.train_batch_size


def prepares_inputs_itself(trainer: Any) -> bool:
    """Return whether a subclass of ``Trainer`` prepares the inputs of a step itself."""
    return type(trainer)._prepare_inputs is not Trainer._prepare_inputs


# Functions that decide whether sdpa needs no mask. A version of transformers may lack one or both.
_MASK_QUESTIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_original_functions: dict[str, Callable[..., bool]] = {}


def decide_masks_without_values(*, padded: bool) -> None:
    """Make transformers decide about attention masks without tensor values, for the rest of this process.

    Samples are taken to be never packed. Unless they are ``padded``, a mask masks nothing, and a real step drops it.
    """
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    for name in _MASK_QUESTIONS:
        if hasattr(masking_utils, name):
            original = _original_functions.setdefault(name, getattr(masking_utils, name))
            setattr(masking_utils, name, original if padded else _without_padding(original))


def _without_padding(ignore: Callable[..., bool]) -> Callable[..., bool]:
    """Return a function that calls ``ignore`` without a padding mask, so that no mask's values are read."""
    return lambda padding_mask, *rest, **named: ignore(None, *rest, **named)


def checkpointing_layers(model: torch.nn.Module) -> int | None:
    """Return the number of layers that support gradient checkpointing; ``None`` without any."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules()) or None
