"""A plain PyTorch loop over images, written as a function for --loop; trains with a file of settings by itself."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import autotune


def train(config: Any) -> None:
    """Train a small convolutional network on random images."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4)
    )
    data = TensorDataset(torch.randn(128, 3, 16, 16), torch.randint(0, 4, (128,)))
    loader = DataLoader(data, batch_size=config.per_device_batch_size, shuffle=True, drop_last=True)
    model(data.tensors[0][:1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (images, labels) in enumerate(autotune.steps(loader), start=1):
        with config.autocast("cpu"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        (loss / config.gradient_accumulation_steps).backward()
        if number % config.gradient_accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(f"trained with {config}")


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        train(autotune.LoopConfig(**json.load(file)))
