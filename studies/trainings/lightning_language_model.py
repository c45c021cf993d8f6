"""Train a language model of the size of GPT-2 with Lightning's ``Trainer``, on made-up texts.

It is written as Lightning's examples are, and knows nothing of autotune. With ``--scale_batch_size`` it looks for a
batch with Lightning's own finder first.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

Sample = dict[str, torch.Tensor]
WARM_UP_STEPS = 5


class Texts(Dataset[Sample]):
    """Texts of random tokens, all of full length."""

    def __init__(self, tokens: int, count: int) -> None:
        self._texts = torch.randint(0, 50000, (64, tokens), generator=torch.Generator().manual_seed(0))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        text = self._texts[index % 64]
        return {"input_ids": text, "labels": text}


class LanguageModel(pl.LightningModule):  # type: ignore[misc]
    """GPT-2 with its own loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.batch_size = args.batch_size
        heads = args.hidden_size // 64
        self.config = GPT2Config(n_embd=args.hidden_size, n_layer=args.layers, n_head=heads)
        self.model: Any = None

    def configure_model(self) -> None:
        """Make the model on the device."""
        if self.model is None:
            self.model = GPT2LMHeadModel(self.config).train()

    def training_step(self, batch: Sample, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Sample]:
        """Return the texts in any order."""
        return DataLoader(Texts(self.args.max_length, self.args.texts), batch_size=self.batch_size, shuffle=True)


class Speed(pl.Callback):  # type: ignore[misc]
    """Takes down how fast the steps after the first ones were."""

    def __init__(self, started: float | None) -> None:
        self._started = started
        self._began = self._seen = 0.0
        self.seconds = 0.0
        self.steps = 0
        self.seconds_until_steady: float | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look at the clock after the last of the first steps, and after the last step."""
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        first = min(WARM_UP_STEPS, trainer.max_steps - 1)
        if trainer.global_step == first:
            outputs["loss"].item()
            self._began = time.perf_counter()
            self.seconds_until_steady = None if self._started is None else time.time() - self._started
        elif trainer.global_step == trainer.max_steps:
            outputs["loss"].item()
            self.seconds = time.perf_counter() - self._began
            self.steps = trainer.global_step - first


def make_trainer(args: argparse.Namespace, accumulation: int, *callbacks: pl.Callback) -> pl.Trainer:
    """Return a Trainer that writes nothing but what the finder needs."""
    return pl.Trainer(
        max_steps=args.max_steps,
        precision=args.precision,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=1.0,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    )


def main() -> None:
    """Read the options, train, and tell the speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--scale_batch_size", choices=["power", "binsearch"])
    parser.add_argument("--effective_batch", type=int, default=64)
    parser.add_argument("--memory_limit_bytes", type=int, help="what the allocator may reserve of the GPU")
    parser.add_argument("--started", type=float, help="the time at which this process was started")
    parser.add_argument("--report", help="a file for the speed")
    args = parser.parse_args()
    if args.memory_limit_bytes is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_limit_bytes / total))
    accumulation = args.accumulate_grad_batches
    module, answer = LanguageModel(args), None
    if args.scale_batch_size:
        answer = Tuner(make_trainer(args, 1)).scale_batch_size(module, mode=args.scale_batch_size)
        # The largest part of the effective batch that is no larger than what was found.
        batch = next(size for size in range(answer or 1, 0, -1) if args.effective_batch % size == 0)
        module.batch_size, accumulation = batch, args.effective_batch // batch
    speed = Speed(args.started)
    trainer = make_trainer(args, accumulation, speed)
    trainer.fit(module)
    found = {
        "batch": module.batch_size,
        "accumulation": accumulation,
        "precision": str(trainer.precision),
        "samples_per_second": module.batch_size * accumulation * speed.steps / max(speed.seconds, 1e-9),
        "steps": speed.steps,
        "seconds_until_steady": speed.seconds_until_steady,
        "finder": answer,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
    }
    print(json.dumps(found))
    if args.report:
        with open(args.report, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
