"""Trains with accelerate under Hydra, and reports to TensorBoard and a log: it knows nothing of autotune."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import hydra
import torch
from accelerate import Accelerator
from hydra.core.config_store import ConfigStore
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)


@dataclass
class Config:
    """What Hydra reads from its command line."""

    batch_size: int = 8
    gradient_accumulation_steps: int = 1
    epochs: int = 1


ConfigStore.instance().store(name="config", node=Config)


class Vectors(Dataset[dict[str, torch.Tensor]]):
    """Random vectors and their signs."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "labels": (inputs.sum() > 0).long()}


@hydra.main(version_base=None, config_name="config")
def main(config: Any) -> None:
    """Train, report and save."""
    writer = SummaryWriter()
    metrics = SummaryWriter("metrics")
    accelerator = Accelerator(
        log_with="tensorboard", project_dir=".", gradient_accumulation_steps=config.gradient_accumulation_steps
    )
    accelerator.init_trackers("trained")
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Vectors(), batch_size=config.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    logger.info("training with batches of %d", config.batch_size)
    step = 0
    for _ in range(config.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            writer.add_scalar("loss", loss.item(), step)
            metrics.add_scalar("loss", loss.item(), step)
            metrics.flush()
            accelerator.log({"loss": loss.item()}, step=step)
            step += 1
    print(f"trained {step} steps of {config.batch_size}")
    torch.save(model.state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
