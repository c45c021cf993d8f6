"""Trainers that do not train as they are told, as ``--trainer`` takes them, and honest ones that look like them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from build_trainer import build_plain
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

MOST = 8
"""Samples for which there is memory."""


def make(overrides: dict[str, Any], kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """The tiny BERT of ``build_trainer.py``, by another Trainer."""
    plain = build_plain(overrides)
    return kind(model=plain.model, args=plain.args, **{"train_dataset": plain.train_dataset, **options})


def _run_out(inputs: Any) -> None:
    if len(inputs["input_ids"]) > MOST:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class RunsOut(Trainer):
    """Has a model without memory for more than eight samples."""

    def compute_loss(self, model: Any, inputs: Any, *words: Any, **options: Any) -> Any:
        hook = model.register_forward_pre_hook(lambda _, __, named: _run_out(named), with_kwargs=True)
        try:
            return super().compute_loss(model, inputs, *words, **options)
        finally:
            hook.remove()


class CatchesInStep(RunsOut):
    """Returns a loss of zero without a backward pass where memory runs out, as GLiNER's does."""

    def training_step(self, model: Any, inputs: Any, *words: Any, **options: Any) -> torch.Tensor:
        try:
            return super().training_step(model, inputs, *words, **options)  # type: ignore[no-any-return]
        except Exception:
            return torch.tensor(0.0, requires_grad=True)


class KeepsItsLoader(Trainer):
    """Makes batches of two, whatever its arguments say."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator))


class Batches(IterableDataset[Any]):
    """Ready-made batches."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Any:
        while True:
            yield {"input_ids": torch.randint(0, 64, (self._size, 12)), "labels": torch.zeros(self._size).long()}


class Ready(Trainer):
    """Goes over ready-made batches."""

    size: int | None = None

    def get_train_dataloader(self) -> Any:
        return DataLoader(Batches(self.size or self.args.train_batch_size), batch_size=None)


class ReadyOfTwo(Ready):
    """Whatever its arguments say."""

    size = 2


class ReadyOfThirtyTwo(Ready):
    """More than its arguments say."""

    size = 32


# Honest.
ready = functools.partial(make, kind=Ready)

catch_in_step = functools.partial(make, kind=CatchesInStep)
keep_its_loader = functools.partial(make, kind=KeepsItsLoader)
ready_of_two = functools.partial(make, kind=ReadyOfTwo)
ready_of_thirty_two = functools.partial(make, kind=ReadyOfThirtyTwo)


def flatten(overrides: dict[str, Any]) -> Trainer:
    """Honest: all samples of a batch in one row."""

    def collate(samples: Any) -> dict[str, torch.Tensor]:
        tokens = torch.cat([sample["input_ids"] for sample in samples])[None]
        return {"input_ids": tokens, "position_ids": torch.zeros_like(tokens), "labels": samples[0]["labels"][None]}

    return make(overrides, data_collator=collate)


def other_weights(overrides: dict[str, Any]) -> Trainer:
    """Steps the weights of another model."""
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    return make(overrides, optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)))
