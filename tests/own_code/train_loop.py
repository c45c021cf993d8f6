"""Training loops of one's own, as ``--loop`` takes them: a good one in plain PyTorch, and some that are not."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import autotune


def train(config: Any) -> None:
    """Tells 96 random points apart."""
    torch.manual_seed(0)
    body, head = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU()), torch.nn.Linear(64, 2)
    model = torch.nn.Sequential(body, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(96, 32), torch.randint(0, 2, (96,)))
    loader = DataLoader(data, batch_size=config.per_device_batch_size, shuffle=True)
    print(f"trains with {config}, loads with {loader.num_workers} processes")
    for _ in range(3):
        for number, (inputs, labels) in enumerate(autotune.steps(loader), start=1):
            with config.autocast("cpu"):
                hidden = (
                    checkpoint(body, inputs, use_reentrant=False) if config.gradient_checkpointing else body(inputs)
                )
                loss = torch.nn.functional.cross_entropy(head(hidden), labels) / config.gradient_accumulation_steps
            loss.backward()
            if number % config.gradient_accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        print("evaluates")


def take_the_batch_alone(config: Any) -> None:
    """Uses nothing else of its config."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        with autotune.step():
            model(torch.randn(config.per_device_batch_size, 4)).mean().backward()
            optimizer.step()


def accumulate_otherwise(config: Any) -> None:
    """Reads how many batches to accumulate, and steps after each."""
    _ = config.gradient_accumulation_steps
    take_the_batch_alone(config)


def count_to_its_length(config: Any) -> None:
    """Divides by what is left of an epoch of three batches, as loops do that accumulate fewer batches at its end."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, accumulation = config.per_device_batch_size, config.gradient_accumulation_steps
    loader = DataLoader(TensorDataset(torch.randn(3 * batch * accumulation, 4)), batch_size=batch)
    left = len(loader) % accumulation
    print(f"{len(loader)} batches, {left} left")
    for number, (inputs,) in enumerate(autotune.steps(loader)):
        share = 1 / (accumulation if number < len(loader) - left else left)
        (model(inputs).mean() * share).backward()
        if (number + 1) % accumulation == 0:
            optimizer.step()


def forget_steps(config: Any) -> None:
    """Trains without saying where its steps are."""
    torch.nn.Linear(4, 1)(torch.ones(config.per_device_batch_size, 4)).mean().backward()


def parse_options(config: Any) -> None:
    """Wants an option that nobody gives."""
    parser = argparse.ArgumentParser(prog="train_loop.py")
    parser.add_argument("--data", required=True)
    parser.parse_args([])


def end_at_once(config: Any) -> None:
    """Trains nothing."""


def nest(config: Any) -> None:
    """Goes over the steps within the steps."""
    for _ in autotune.steps([1, 2]):
        for _ in autotune.steps([1, 2]):
            pass


def say_it_twice(config: Any) -> None:
    """Marks each batch by both means."""
    model = torch.nn.Linear(4, 1)
    for batch in autotune.steps(_stream(config.per_device_batch_size)):
        with autotune.step():
            model(batch).mean().backward()


def keep_its_batch(config: Any) -> None:
    """Reads the batch of its config, and makes batches of eight."""
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(f"batches of {config.per_device_batch_size}")
    for (batch,) in autotune.steps(DataLoader(TensorDataset(torch.ones(96, 32)), batch_size=8)):
        model(batch).mean().backward()
        optimizer.step()


def train_another_model(config: Any) -> None:
    """Makes its optimizer before the model that it trains."""
    optimizer = torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1)
    model = torch.nn.Linear(4, 1)
    for batch in autotune.steps(_stream(config.per_device_batch_size)):
        model(batch).mean().backward()
        optimizer.step()


def end_soon(config: Any) -> None:
    """Makes no more than five steps."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(autotune.steps(_stream(config.per_device_batch_size))):
        model(batch).mean().backward()
        optimizer.step()
        if number == 4:
            break


def _stream(batch: int) -> Iterator[torch.Tensor]:
    with contextlib.suppress(GeneratorExit):
        while True:
            yield torch.randn(batch, 4)
