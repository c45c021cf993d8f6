"""Trains with accelerate, as Hugging Face's examples without a Trainer do: it knows nothing of autotune."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSequenceClassification, default_data_collator, get_scheduler


def parse_args() -> argparse.Namespace:
    """The options of those examples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=None)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--output_dir", type=str, default=None)
    parser.add_argument("--log_dir", type=str, default=None)
    parser.add_argument("--own_modulo", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Load, train, evaluate, save."""
    args = parse_args()
    if args.log_dir:
        os.makedirs(args.log_dir, exist_ok=True)
        logging.basicConfig(filename=os.path.join(args.log_dir, "train.log"), force=True)
    own = {} if args.own_modulo else {"gradient_accumulation_steps": args.gradient_accumulation_steps}
    accelerator = Accelerator(log_with="all", project_dir=args.output_dir, **own)
    os.makedirs(args.output_dir, exist_ok=True)
    config = AutoConfig.for_model(
        "bert", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    model = AutoModelForSequenceClassification.from_config(config)
    data: Any = [{"input_ids": torch.randint(0, 64, (12,)), "labels": n % 2} for n in range(args.samples)]
    eval_dataloader = DataLoader(data[:16], batch_size=4, collate_fn=default_data_collator)
    train_dataloader = DataLoader(
        data, shuffle=True, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = args.max_train_steps or 1000
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    model, optimizer, eval_dataloader, train_dataloader, scheduler = accelerator.prepare(
        model, optimizer, eval_dataloader, train_dataloader, scheduler
    )
    accelerator.init_trackers("own", config=vars(args))
    print(f"{accelerator.mixed_precision}, {accelerator.gradient_accumulation_steps}, {len(train_dataloader)} batches")
    print(f"loads with {train_dataloader.num_workers} processes")
    completed = 0
    for _ in range(args.num_train_epochs):
        model.train()
        for number, batch in enumerate(train_dataloader):
            if number == completed == 0:
                print(f"float32 products: {torch.get_float32_matmul_precision()}")
            if args.own_modulo:
                loss = model(**batch).loss / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if number % args.gradient_accumulation_steps == 0 or number == len(train_dataloader) - 1:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    completed += 1
            else:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                completed += accelerator.sync_gradients
            accelerator.save_state(os.path.join(args.output_dir, f"step_{completed}"))
            if args.max_train_steps and completed >= args.max_train_steps:
                break
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                accelerator.gather(model(**batch).logits)
        print(f"evaluated; trained with batches of {train_dataloader.total_batch_size}")
    accelerator.unwrap_model(model).save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
