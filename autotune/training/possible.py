"""Look which settings a ``Trainer`` can have: apply them one by one, and compare losses where batches are changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import Trainer

from autotune.training import apply
from autotune.training.batches import Loading, SettingUnavailableError, in_evaluation_mode
from autotune.training.graphs import check_code

SETTINGS: dict[str, Any] = {
    "length_multiple": 64,
    "unpadded": True,
    "sparse_prediction": True,
    "fused_loss": True,
    "padding_free": True,
}
"""The settings that are tried, as arguments of ``apply``."""
# Largest relative difference of the losses of a batch as it is and changed, from rounding alone; in 16 bits. Choices.
_ALIKE, _ALIKE_IN_HALF = 1e-3, 2e-2
# Number of batches whose losses are compared. A choice: random weights may give padding the same loss by chance.
_COMPARED = 3


def obstacles(trainer: Trainer, batches: Sequence[Any]) -> dict[str, str]:
    """Try settings on a ``Trainer`` and a few of its batches; return why it cannot have some, by the setting's name.

    Settings stay applied, so that the Trainer must not train afterwards.
    """
    # On the CPU, where a collator makes them: a loader of accelerate has put them on the device.
    batches = sorted((send_to_device(batch, "cpu") for batch in batches), key=_masked_tokens, reverse=True)
    reasons = {}
    try:
        check_code(trainer)
    except SettingUnavailableError as error:
        reasons["cuda_graphs"] = str(error)
    if (why := _why_not_ordered(trainer)) is not None:
        reasons["train_sampling_strategy"] = why
    for name, value in SETTINGS.items():
        try:
            _check_setting(trainer, batches, name, value)
        except SettingUnavailableError as error:
            reasons[name] = " ".join(str(error).split())
        except Exception as error:
            # Whatever the code of the user raises where it is called otherwise than in its training.
            reasons[name] = f"its Trainer could not be tried with it: {type(error).__name__}: {error}".splitlines()[0]
    return reasons


def _why_not_ordered(trainer: Trainer) -> str | None:
    """Return why a ``Trainer`` cannot group samples by length; ``None`` where it can."""
    data: Any = trainer.train_dataset
    if type(trainer)._get_train_sampler is not Trainer._get_train_sampler or (
        type(trainer).get_train_dataloader is not Trainer.get_train_dataloader
    ):
        return f"{type(trainer).__name__} decides the order of its samples"
    if not hasattr(data, "__len__"):
        return "its samples are a stream, whose order stays"
    name = trainer.processing_class.model_input_names[0] if trainer.processing_class is not None else "input_ids"
    has_lengths = trainer.args.length_column_name in (getattr(data, "column_names", None) or ())
    if not has_lengths and not (isinstance(data[0], Mapping) and name in data[0]):
        return f"its samples have no {name}, by whose lengths a Trainer groups them"
    return None


def _check_setting(trainer: Trainer, batches: Sequence[Any], name: str, value: Any) -> None:
    """Apply a setting to a ``Trainer``; raise ``SettingUnavailableError`` if that fails or changes the loss."""
    load = trainer.get_train_dataloader
    expected = [_loss(trainer, batch) for batch in batches[:_COMPARED]]
    apply(trainer, **{name: value})
    try:
        if not isinstance(loading := trainer.get_train_dataloader, Loading) or loading is load:
            # The setting leaves batches as they are, and ``apply`` has compared the loss.
            return
        changed = [loading.change(batch) for batch in batches]
        if not expected:
            raise SettingUnavailableError("its batches could not be looked at")
        pairs = zip(expected, changed, strict=False)
        differences = [abs(_loss(trainer, batch) - loss) / max(abs(loss), 1e-6) for loss, batch in pairs]
        is_half = next(trainer.model.parameters()).dtype in (torch.bfloat16, torch.float16)
        if not all(difference <= (_ALIKE_IN_HALF if is_half else _ALIKE) for difference in differences):
            raise SettingUnavailableError(f"the loss of a batch is another one with it, by {max(differences):.1%}")
    finally:
        # Changes of batches would add up over the settings.
        trainer.get_train_dataloader = load


def _masked_tokens(batch: Any) -> int:
    """Return the number of masked tokens in a batch: one with many shows whether the loss counts padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return int((mask == 0).sum()) if isinstance(mask, torch.Tensor) else 0


@torch.no_grad()
def _loss(trainer: Any, batch: Any) -> float:
    """Return the loss of a batch without dropout."""
    with in_evaluation_mode(trainer.model):
        inputs = trainer._prepare_inputs(dict(batch) if isinstance(batch, Mapping) else batch)
        with trainer.compute_loss_context_manager():
            return float(trainer.compute_loss(trainer.model, inputs))
