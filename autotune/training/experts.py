"""Choose how the products of a mixture of experts are computed."""

from __future__ import annotations

from transformers import Trainer

from autotune.training.batches import without_adapters
from autotune.training.errors import SettingUnavailableError


def choose_experts(trainer: Trainer, name: str) -> None:
    """Set the implementation of a model's experts: ``grouped_mm``, ``batched_mm`` or ``eager``.

    Raises ``SettingUnavailableError`` for a model without experts, or with a single implementation.
    """
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    kind = type(model).__name__
    if not getattr(model, "_can_set_experts_implementation", lambda: False)():
        raise SettingUnavailableError(f"this transformers has one way to compute the experts of {kind}, if it has any")
    try:
        model.set_experts_implementation(name)
    except (ValueError, ImportError, RuntimeError) as error:
        raise SettingUnavailableError(f"{kind} has no experts by {name}: {error}") from error
