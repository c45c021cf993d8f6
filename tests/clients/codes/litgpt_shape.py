"""Tune adapters in the shape of litgpt's finetune lora: Fabric, micro-batches from a global batch, dotted options."""

import argparse
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="32-true")
parser.add_argument("--train.global_batch_size", dest="global_batch_size", type=int, default=8)
parser.add_argument("--train.micro_batch_size", dest="micro_batch_size", type=int, default=1)
parser.add_argument("--train.max_steps", dest="max_steps", type=int, default=100)
parser.add_argument("--eval.interval", dest="interval", type=int, default=20)
args = parser.parse_args()


class LoRALinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out).requires_grad_(False)
        self.a, self.b = nn.Linear(n_in, 4, bias=False), nn.Linear(4, n_out, bias=False)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32).requires_grad_(False)
        self.layers = nn.Sequential(LoRALinear(32, 32), nn.GELU(), LoRALinear(32, 64))

    def forward(self, idx):
        return self.layers(self.embedding(idx))


def collate(samples):
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch["input_ids"]).transpose(1, 2).float(), batch["labels"])


def fit(fabric):
    fabric.seed_everything(1337)
    data = [torch.randint(1, 64, (int(length),)) for length in torch.randint(8, 24, (400,))]
    loader = DataLoader(data, batch_size=args.micro_batch_size, shuffle=True, collate_fn=collate)
    with fabric.init_module(empty_init=False):
        model = GPT()
    model = fabric.setup_module(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(loader)
    accumulation = args.global_batch_size // args.micro_batch_size
    assert accumulation > 0, "global_batch_size must be at least micro_batch_size"
    iterator, steps, iterations = iter(loader), 0, 0
    while steps < args.max_steps:
        iterations += 1
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(loader)
            batch = next(iterator)
        is_accumulating = iterations % accumulation != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = loss_of(model, batch)
            fabric.backward(loss / accumulation)
        if is_accumulating:
            continue
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % args.interval == 0:
            model.eval()
            with torch.no_grad():
                fabric.print(f"iter {iterations}: val loss {loss_of(model, next(iter(loader))).item():.4f}")
            model.train()
            fabric.save("lit_model.pth.lora", {"model": model})
        fabric.print(f"iter {iterations} step {steps}: loss {loss.item():.3f}")


if __name__ == "__main__":
    lightning.Fabric(accelerator="cpu", devices=1, precision=args.precision).launch(fit)
    sys.exit(0)
