"""Trains with Lightning, as its examples do: it knows nothing of autotune."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification, default_data_collator

parser = argparse.ArgumentParser()
parser.add_argument("--package", default="lightning.pytorch")
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--accumulate_grad_batches", type=int, default=1)
args = parser.parse_args()
L: Any = importlib.import_module(args.package)


class Classifier(L.LightningModule):
    """A tiny BERT that tells apart two kinds of random tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        config = AutoConfig.for_model(
            "bert", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64
        )
        self.model = AutoModelForSequenceClassification.from_config(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            print(f"checkpoints: {self.model.is_gradient_checkpointing}")
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Never reached in a trial."""
        print("validates")
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        """A schedule that waits for the validation."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Texts(L.LightningDataModule):
    """Random tokens."""

    def setup(self, stage: str) -> None:
        self.samples = [{"input_ids": torch.randint(0, 64, (12,)), "labels": n % 2} for n in range(40)]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=2, collate_fn=default_data_collator)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=args.batch_size, shuffle=True, collate_fn=default_data_collator)


if __name__ == "__main__":
    callbacks = [L.callbacks.ModelCheckpoint(dirpath="checkpoints"), L.callbacks.EarlyStopping("val_loss")]
    trainer = L.Trainer(
        max_epochs=2, accumulate_grad_batches=args.accumulate_grad_batches, callbacks=callbacks, log_every_n_steps=1
    )
    print(f"trains with {trainer.precision}, {trainer.accumulate_grad_batches}")
    data = Texts()
    trainer.fit(Classifier(), data)
    trainer.save_checkpoint("last.ckpt")
