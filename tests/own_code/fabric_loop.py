"""Trains with Lightning's Fabric, as its examples do: it knows nothing of autotune."""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification, default_data_collator

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
parser.add_argument("--precision", default="32-true")
args = parser.parse_args()

fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=args.precision)
config = AutoConfig.for_model(
    "bert", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64
)
model = AutoModelForSequenceClassification.from_config(config)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
samples: Any = [{"input_ids": torch.randint(0, 64, (12,)), "labels": n % 2} for n in range(64)]
loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=args.batch_size, collate_fn=default_data_collator))
for _epoch in range(2):
    for number, batch in enumerate(loader, start=1):
        is_accumulating = number % args.gradient_accumulation_steps != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(model(**batch).loss / args.gradient_accumulation_steps)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
    fabric.save("model.ckpt", {"model": model})
print("trained")
