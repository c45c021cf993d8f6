"""Pairs of levers in trainings of samples of different lengths, and twenty steps with them."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from trainings import T5, How, Training, causal, of, ragged
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    TrainingArguments,
)

from autotune.training import apply
from autotune.worker.trial.look import turn_off_dropout

# Its name since transformers 5.23, and before.
_CHECKPOINTING = next(
    field.name
    for field in fields(TrainingArguments)
    if field.name in {"activation_checkpointing", "gradient_checkpointing"}
)

LEVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "few lengths": ({"length_multiple": 8}, {}),
    "rows": ({"padding_free": True}, {}),
    "fused loss": ({"fused_loss": True}, {}),
    "sparse prediction": ({"sparse_prediction": True}, {}),
    "some layers": ({"checkpointed_layers": 1}, {_CHECKPOINTING: True}),
    "compiled": ({"regional_compilation": True}, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "graphs": ({"cuda_graphs": True}, {}),
    "non-blocking": ({}, {"accelerator_config": {"non_blocking": True}, "logging_nan_inf_filter": False}),
}
"""What is applied and the fields of ``TrainingArguments`` for each lever."""

PAIRS = {
    "causal": [*itertools.combinations(("few lengths", "fused loss", "some layers", "graphs", "compiled"), 2),
               *(("rows", name) for name in ("fused loss", "some layers"))],
    "masked": [*itertools.combinations(("few lengths", "sparse prediction", "some layers", "graphs", "compiled"), 2),
               ("graphs", "non-blocking")],
}  # fmt: skip
"""The pairs that are trained for twenty steps, by the kind of the training."""


def _classes_of_other_lengths() -> list[dict[str, Any]]:
    return [row | {"labels": torch.tensor(at % 2)} for at, row in enumerate(ragged())]


# Eager attention builds its mask of a number on the host, which a CUDA graph cannot capture (transformers 5.17).
OTHER_LENGTHS = {
    "causal": Training("", "", causal("llama", attention="sdpa", num_key_value_heads=2), ragged, How()),
    "masked": Training("", "", of(AutoModelForMaskedLM, "bert", attention="sdpa"), ragged, How()),
    "classes": Training("", "", of(AutoModelForSequenceClassification, "bert"), _classes_of_other_lengths, How()),
    "targets": Training("", "", of(AutoModelForSeq2SeqLM, "t5", **T5), ragged, How()),
}


def together(names: Iterable[str], accumulation: int = 2) -> How:
    """A way to train with some levers, the same eight samples a step."""
    applied, arguments = ({k: v for name in names for k, v in LEVERS[name][part].items()} for part in (0, 1))
    return How(8 // accumulation, accumulation, tuple(arguments.items()), tuple(applied.items()))


@dataclass(frozen=True)
class TwentySteps:
    """What twenty optimizer steps did, with an evaluation after every ten."""

    losses: list[float]
    evaluated: list[float]
    weights: torch.Tensor


def twenty_steps(kind: str, how: How, folder: Path, resumed: Path | None = None, **others: Any) -> TwentySteps:
    """Train for twenty steps without dropout; ``others`` are further fields of ``TrainingArguments``."""
    training = OTHER_LENGTHS[kind]
    training = replace(training, options=(("eval_dataset", training.data()),))
    schedule = {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 10}
    trainer = training.made(how, folder, max_steps=20, logging_steps=1, **schedule, **others)
    turn_off_dropout(trainer.model)
    apply(trainer, **dict(how.applied or ()))
    trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    losses, evaluated = ([e[key] for e in trainer.state.log_history if key in e] for key in ("loss", "eval_loss"))
    return TwentySteps(losses, evaluated, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
