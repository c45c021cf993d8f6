"""Train images in the shape of timm's train.py: AMP, accumulation counted against len(loader), epochs, checkpoints."""

import argparse
import contextlib
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_tiny")
parser.add_argument("-b", "--batch-size", type=int, default=8, metavar="N")
parser.add_argument("-vb", "--validation-batch-size", type=int, default=None)
parser.add_argument("--grad-accum-steps", type=int, default=1)
parser.add_argument("--grad-checkpointing", action="store_true", default=False)
parser.add_argument("--amp", action="store_true", default=False)
parser.add_argument("--amp-dtype", default="float16", type=str)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--torchcompile", nargs="?", type=str, default=None, const="eager")
parser.add_argument("--output", default=".")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.grad_checkpointing = False
        self.stem = nn.Conv2d(3, 16, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1)) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.grad_checkpointing and self.training else block(x)
        return self.head(x.mean((2, 3)))


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, amp_autocast):
    accum_steps = args.grad_accum_steps
    last_accum_steps = len(loader) % accum_steps
    updates_per_epoch = (len(loader) + accum_steps - 1) // accum_steps
    last_batch_idx = len(loader) - 1
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    started = time.time()
    model.train()
    optimizer.zero_grad()
    for batch_idx, (images, target) in enumerate(loader):
        last_batch = batch_idx == last_batch_idx
        need_update = last_batch or (batch_idx + 1) % accum_steps == 0
        update_idx = batch_idx // accum_steps
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps
        with amp_autocast():
            loss = loss_fn(model(images), target)
        (loss / accum_steps).backward()
        if not need_update:
            continue
        optimizer.step()
        optimizer.zero_grad()
        percent = 100.0 * update_idx / (updates_per_epoch - 1)
        print(f"Train: {epoch} [{update_idx}/{updates_per_epoch} ({percent:.0f}%)] {time.time() - started:.1f} s")


@torch.inference_mode()
def validate(model, loader):
    model.eval()
    right = sum(int((model(images).argmax(-1) == target).sum()) for images, target in loader)
    print(f"Test: {right} right")


def main():
    args = parser.parse_args()
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[args.amp_dtype]
    amp = (lambda: torch.autocast("cpu", dtype)) if args.amp else contextlib.nullcontext
    data = TensorDataset(torch.randn(200, 3, 32, 32), torch.randint(0, 4, (200,)))
    loader_train = DataLoader(data, args.batch_size, shuffle=True, drop_last=True)
    loader_eval = DataLoader(data, args.validation_batch_size or args.batch_size)
    model = Net()
    model.grad_checkpointing = args.grad_checkpointing
    if args.torchcompile:
        model = torch.compile(model, backend=args.torchcompile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, loader_train, optimizer, nn.CrossEntropyLoss(), args, amp)
        validate(model, loader_eval)
        torch.save(model.state_dict(), f"{args.output}/last.pth.tar")


if __name__ == "__main__":
    main()
