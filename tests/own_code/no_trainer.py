"""Trains with accelerate as transformers' own ``run_*_no_trainer.py`` do: its schedule is made of its own options."""

from __future__ import annotations

import argparse
import math

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

CONSTANT = 8


def main() -> None:
    """Train, and print what was trained."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_bs", "--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--accum", type=int, default=8)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int)
    parser.add_argument("--constant", action="store_true", help="accumulate what the code says")
    args = parser.parse_args()
    accumulation = CONSTANT if args.constant else args.accum
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    data = [{"input_ids": torch.arange(8) + i % 9, "labels": torch.arange(8) + i % 9} for i in range(256)]
    train_dataloader = DataLoader(data, shuffle=True, batch_size=args.train_bs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates_each = math.ceil(len(train_dataloader) / accumulation)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * updates_each
    scheduler = get_scheduler("linear", optimizer, 0, args.max_train_steps)
    model, optimizer, train_dataloader, scheduler = accelerator.prepare(model, optimizer, train_dataloader, scheduler)
    completed = samples = 0
    for _ in range(math.ceil(args.max_train_steps / updates_each)):
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            samples += len(batch["input_ids"])
            completed += accelerator.sync_gradients
            if completed >= args.max_train_steps:
                break
    rate, precision = scheduler.get_last_lr()[0], accelerator.mixed_precision
    print(f"updates {completed}, samples {samples}, last lr {rate:.2e}, {precision}")


if __name__ == "__main__":
    main()
