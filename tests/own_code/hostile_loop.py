"""A loop that does to its folder, at five moments, whatever code may do to a folder; see ``deeds``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deeds
import torch
from torch.utils.data import DataLoader, Dataset

import autotune


class Samples(Dataset[torch.Tensor]):
    """Random points, the first of which is loaded by a worker that has other things to do."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 0:
            deeds.do_all(FOLDER, "in a worker")
        return torch.ones(8) * number


FOLDER = Path(os.environ["HOSTILE_FOLDER"])


def train(config: Any) -> None:
    """Train, and tamper with files before, in and after the first step."""
    deeds.do_all(FOLDER, "before")
    deeds.write_at_exit(FOLDER)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = DataLoader(Samples(), batch_size=config.per_device_batch_size, num_workers=1)
    for number, points in enumerate(autotune.steps(loader), start=1):
        loss = model(points).square().mean() / config.gradient_accumulation_steps
        loss.backward()
        if number == 1:
            deeds.do_all(FOLDER, "first step")
        if number % config.gradient_accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number == 2 * config.gradient_accumulation_steps:
            deeds.do_all(FOLDER, "second step")


def save(config: Any) -> None:
    """Train, and write over a file after the second step, as scripts with checkpoints do."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for number, points in enumerate(autotune.steps(DataLoader(Samples(), batch_size=config.per_device_batch_size))):
        model(points).square().mean().backward()
        optimizer.step()
        if number == 1:
            (FOLDER / "best.pt").write_text("of a trial")


def save_with_torch(config: Any) -> None:
    """Write over a file by a writer in C++."""
    torch.save({}, FOLDER / "best.pt")
    save(config)
