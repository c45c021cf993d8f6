"""Trains with a Trainer in the way that the first word of its command line names, and prints what it has."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

WAY = sys.argv[1] if len(sys.argv) > 1 else "plain"


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch of samples, padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": torch.tensor(mask)}


class Late(TrainerCallback):
    """Changes a field when training has begun."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set another accumulation."""
        args.gradient_accumulation_steps = 3


class Hungry(TrainerCallback):
    """Runs out of memory at a step, with batches of eight."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for more than there is."""
        if WAY == "hungry" and state.global_step == 7 and args.per_device_train_batch_size == 8:
            torch.empty(2**50)


def main() -> None:
    """Train, and go on in the way that was asked for."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4))
    if WAY == "half":
        model = model.to(torch.bfloat16)
    data: Any = [{"input_ids": (r := list(range(5, 15 + i % 7))), "labels": r} for i in range(64)]
    arguments = TrainingArguments(
        output_dir="out", max_steps=40 if WAY == "watched" else 2, logging_steps=20,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        torch_compile_backend="eager", per_device_train_batch_size=4,
    )  # fmt: skip
    if WAY in ("hungry", "sated", "never-saves"):
        arguments.max_steps, arguments.save_steps, arguments.output_dir = 12, 4, WAY
        arguments.save_strategy = "no" if WAY == "never-saves" else "steps"
    if WAY == "late":
        arguments.per_device_train_batch_size = 4
        arguments.bf16 = False
    made: dict[str, Any] = {"args": arguments, "train_dataset": data, "data_collator": pad}
    trainer = Trainer(model, callbacks=[Late()] if WAY == "callback" else [Hungry()], **made)
    if WAY == "checkpointing":
        model.gradient_checkpointing_enable()
    trainer.train(resume_from_checkpoint=sys.argv[2] if len(sys.argv) > 2 else None)
    if WAY in ("hungry", "sated"):
        torch.save([each.detach() for each in model.parameters()], f"{WAY}.pt")
    args = trainer.args
    compiled, precision = hasattr(trainer.model_wrapped, "_orig_mod"), trainer.accelerator.mixed_precision
    print(f"{args.train_batch_size} × {args.gradient_accumulation_steps}, {precision}, {compiled}")
    if WAY == "watched":
        print("logged", sorted(trainer.state.log_history[1]))
    if WAY == "again":
        trainer.train()
        Trainer(model, **made).train()
        print("loss", Trainer(model, **made, eval_dataset=data).evaluate()["eval_loss"])
        print("generated", model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3).tolist())
        trainer.train()
        print("done")


if __name__ == "__main__":
    main()
