"""transformers' ``Trainer`` with ``auto_find_batch_size=True``, for a few steps."""

from __future__ import annotations

import tempfile

from shared import Task
from transformers import Trainer, TrainingArguments


def main() -> None:
    """Find a batch and tell it."""
    task = Task()
    settings = task.settings
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            auto_find_batch_size=True,
            per_device_train_batch_size=settings.start,
            max_steps=settings.steps,
            bf16=settings.bf16,
            optim="adamw_torch_fused",
            use_cpu=settings.device == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(task.model(), arguments, data_collator=task.collate, train_dataset=task.dataset)
        trainer.train()
        task.answer(trainer.state.train_batch_size)


if __name__ == "__main__":
    main()
