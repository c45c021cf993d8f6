"""Train a text classifier of the size of BERT-large with an ``Accelerator``, on made-up texts.

It is written as accelerate's examples are, and knows nothing of autotune. With ``--auto_find_batch_size`` it looks for
a batch with accelerate's own finder first.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

Sample = dict[str, torch.Tensor]
WARM_UP_STEPS = 5


class Texts(Dataset[Sample]):
    """Texts of random tokens, all of full length."""

    def __init__(self, tokens: int, count: int) -> None:
        self._texts = torch.randint(1000, 30000, (64, tokens), generator=torch.Generator().manual_seed(0))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": self._texts[index % 64], "labels": torch.tensor(index % 2)}


def train(args: argparse.Namespace, batch_size: int) -> dict[str, Any]:
    """Train with batches of this size; return how fast the steps after the first ones were."""
    accumulation = args.gradient_accumulation_steps
    if args.auto_find_batch_size:
        # The largest part of the effective batch that is no larger than what the finder tries.
        batch_size = next(size for size in range(batch_size, 0, -1) if args.effective_batch % size == 0)
        accumulation = args.effective_batch // batch_size
        args.tried.append(batch_size)
    accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=accumulation)
    config = BertConfig(
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        intermediate_size=4 * args.hidden_size,
    )
    with accelerator.device:
        model = BertForSequenceClassification(config)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    loader = DataLoader(Texts(args.max_length, args.texts), shuffle=True, batch_size=batch_size)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, args.max_train_steps + 10)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    step, began = 0, 0.0
    while step < args.max_train_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step == min(WARM_UP_STEPS, args.max_train_steps - 1):
                loss.item()
                began = time.perf_counter()
                found_after = None if args.started is None else time.time() - args.started
                first = step
            if step == args.max_train_steps:
                break
    loss.item()
    seconds = time.perf_counter() - began
    return {
        "batch": batch_size,
        "accumulation": accumulation,
        "precision": accelerator.mixed_precision,
        "samples_per_second": batch_size * accumulation * (step - first) / seconds,
        "steps": step - first,
        "seconds_until_steady": found_after,
        "tried": args.tried,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
    }


def main() -> None:
    """Read the options, train, and tell the speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--max_train_steps", type=int, default=100)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--auto_find_batch_size", action="store_true")
    parser.add_argument("--effective_batch", type=int, default=64)
    parser.add_argument("--memory_limit_bytes", type=int, help="what the allocator may reserve of the GPU")
    parser.add_argument("--started", type=float, help="the time at which this process was started")
    parser.add_argument("--report", help="a file for the speed")
    args = parser.parse_args()
    args.tried = []
    if args.memory_limit_bytes is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_limit_bytes / total))
    if args.auto_find_batch_size:
        finder = find_executable_batch_size(starting_batch_size=args.effective_batch)
        found = finder(lambda batch_size: train(args, batch_size))()
    else:
        found = train(args, args.per_device_train_batch_size)
    print(json.dumps(found))
    if args.report:
        with open(args.report, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
