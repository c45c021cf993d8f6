"""Lightning's batch size finder at its defaults; a third argument names its mode, ``power`` or ``binsearch``.

Without gradient clipping: Lightning refuses it beside a fused optimizer.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner import Tuner
from shared import Sample, Task
from torch.utils.data import DataLoader


class Module(LightningModule):  # type: ignore[misc]
    """The classifier as Lightning wants it."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        self.model = task.model()
        self.batch_size = 2

    def training_step(self, batch: Sample, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._task.optimizer(self.model)

    def train_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(self._task.dataset, self.batch_size, shuffle=True, collate_fn=self._task.collate)


def main() -> None:
    """Find a batch and tell it."""
    task = Task()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu" if task.settings.device == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if task.settings.bf16 else "32-true",
            max_epochs=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batch = Tuner(trainer).scale_batch_size(Module(task), mode=sys.argv[3])
    assert batch is not None
    task.answer(batch)


if __name__ == "__main__":
    main()
