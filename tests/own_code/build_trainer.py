"""Trainers of one's own, as ``--trainer`` takes them: a good one, and some that are not."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


@dataclass
class SmoothArguments(TrainingArguments):
    """Arguments with a field of their own."""

    smoothing: float = field(default=0.1, metadata={"help": "How much of the labels is spread out."})


class SmoothTrainer(Trainer):
    """A loss of its own, and a train method that does more than the original."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=self.args.smoothing)
        return (loss, outputs) if return_outputs else loss

    def train(self, *words: Any, **options: Any) -> Any:
        print("training begins")
        result = super().train(*words, **options)
        print("training is over")
        return result


class SayArguments(TrainerCallback):
    """Prints what is trained with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        batch = f"{args.per_device_train_batch_size} × {args.gradient_accumulation_steps}"
        checkpoints = getattr(args, "activation_checkpointing", args.gradient_checkpointing)
        print(f"trains with {batch}, bf16 {args.bf16}, checkpointing {checkpoints}, {args.optim.value}")


def make(arguments: TrainingArguments, kind: type[Trainer] = SmoothTrainer) -> Trainer:
    """A tiny BERT that tells apart two kinds of random tokens."""
    config = AutoConfig.for_model(
        "bert", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    torch.manual_seed(0)
    samples = [{"input_ids": torch.randint(0, 64, (12,)), "labels": torch.tensor(n % 2)} for n in range(96)]
    return kind(
        model=AutoModelForSequenceClassification.from_config(config),
        args=arguments,
        train_dataset=samples,
        callbacks=[SayArguments()],
    )


def build(overrides: dict[str, Any]) -> Trainer:
    """As it should be: what is not overridden is one's own."""
    own = {"output_dir": "own_output", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    return make(SmoothArguments(**{**own, **overrides}))


def build_plain(overrides: dict[str, Any]) -> Trainer:
    """A stock Trainer."""
    own = {"output_dir": "own_output", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    return make(TrainingArguments(**{**own, **overrides}), Trainer)


def shard_itself(overrides: dict[str, Any]) -> Trainer:
    """Says itself how several GPUs share the model, and goes on without where that is refused."""
    try:
        return build({"fsdp": "full_shard auto_wrap", **overrides})
    except BaseException:
        return build(overrides)


class NumpyTrainer(Trainer):
    """Computes something that needs values."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The loss, for as long as the scores are finite."""
        outputs = model(**inputs)
        return outputs.loss if np.isfinite(outputs.logits.detach().numpy()).all() else outputs.loss * 0


def build_with_numpy(overrides: dict[str, Any]) -> Trainer:
    """Cannot be traced without values."""
    return make(TrainingArguments(**{"output_dir": "own_output", **overrides}), NumpyTrainer)


def ignore(overrides: dict[str, Any]) -> Trainer:
    """Trains as it likes."""
    return make(SmoothArguments(output_dir="own_output", per_device_train_batch_size=4))


def ignore_precision(overrides: dict[str, Any]) -> Trainer:
    """Takes the batch and nothing else."""
    batch = {name: value for name, value in overrides.items() if "batch" in name or "accumulation" in name}
    return make(SmoothArguments(output_dir="own_output", **batch))


class SlowSamples(torch.utils.data.Dataset[Any]):
    """Each takes 20 ms to come by."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: int) -> Any:
        time.sleep(0.02)
        return self._samples[at]


def load_slowly(overrides: dict[str, Any]) -> Trainer:
    """Its data takes longer than what is done with it."""
    trainer = build(overrides)
    trainer.train_dataset = SlowSamples(trainer.train_dataset)
    return trainer


def train_itself(overrides: dict[str, Any]) -> Trainer:
    """Trains before it returns, and takes an error of that for nothing."""
    trainer = build(overrides)
    with contextlib.suppress(Exception):
        trainer.train()
    return trainer


def parse_options(overrides: dict[str, Any]) -> Trainer:
    """Has options of its own, none of which is given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    return build({**vars(parser.parse_args()), **overrides})


def forget(overrides: dict[str, Any]) -> None:
    """Builds and does not return."""
    build(overrides)


def return_the_class(overrides: dict[str, Any]) -> type:
    """Returns what would have to be called."""
    return SmoothTrainer


class OwnLoop(Trainer):
    """Never calls the original."""

    def train(self, *_: Any, **__: Any) -> None:
        """Nothing that could be measured."""


def train_otherwise(overrides: dict[str, Any]) -> Trainer:
    """A Trainer whose training is all its own."""
    return make(SmoothArguments(**{"output_dir": "own_output", **overrides}), OwnLoop)


# Kept where it outlasts this file, which is imported for each call.
_MODELS: list[weakref.ref[torch.nn.Module]] = vars(torch).setdefault("models_of_this_process", [])


def build_one_at_a_time(overrides: dict[str, Any]) -> Trainer:
    """Fails while an earlier model is alive, as where one takes most of the device."""
    if any(model() is not None for model in _MODELS):
        raise torch.OutOfMemoryError("CUDA out of memory: another model is on the device")
    trainer = build(overrides)
    _MODELS.append(weakref.ref(trainer.model))
    return trainer


def die_when_built(overrides: dict[str, Any]) -> Trainer:
    """Ends its process as the kernel does where host memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return build(overrides)


def copy_arguments(overrides: dict[str, Any]) -> Trainer:
    """Arguments that are made twice, as some libraries do."""
    first = TrainingArguments(**{"output_dir": "own_output", "per_device_train_batch_size": 4, **overrides})
    fields = {f.name: getattr(first, f.name) for f in dataclasses.fields(first) if f.init}
    return make(SmoothArguments(**fields))
