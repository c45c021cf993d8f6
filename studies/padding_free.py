"""Measure padded, padding-free and packed batches of a causal language model: real tokens a second, and the loss.

    python studies/padding_free.py --json FILE [--model NAME] [--tokens N] [--steps N] [--batch N] [--cpu]

Samples have random tokens and log-normal lengths whose mean is about a third of the longest, as corpora of instructions
have. Each way trains the same samples with a stock ``Trainer`` in bf16 autocast, from the same weights. Packed rows
hold other samples in a step, so that only the first step's loss of the two others can be compared: it is that of the
same samples. About a minute on an H200.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from autotune.models import catalog
from autotune.training import apply, pack

_WARM_UP = 3


def samples(count: int, longest: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Return samples of at least 16 tokens and at most ``longest``."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, generator=generator).mul(0.8).exp().mul(longest / 4)
    lengths = drawn.clamp(16, longest).long().tolist()
    return [{"input_ids": torch.randint(10, vocabulary, (n,), generator=generator).tolist()} for n in lengths]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch that is padded to its longest sample."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for at, row in enumerate(rows):
        tokens = torch.tensor(row["input_ids"])
        ids[at, : len(tokens)] = labels[at, : len(tokens)] = tokens
        mask[at, : len(tokens)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Counts the tokens that are no padding, and times the steps after the first ones."""

    def __init__(self) -> None:
        self.tokens = 0
        self.started = self.seconds = 0.0
        self.first_loss: float | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin after the warm-up, and note the time after each step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if state.global_step == _WARM_UP:
            self.tokens, self.started = 0, time.perf_counter()
        self.seconds = time.perf_counter() - self.started

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Take down the loss of the first step."""
        if self.first_loss is None and logs:
            self.first_loss = logs.get("loss")


def measured(name: str, data: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train in one way; return its figures."""
    torch.manual_seed(0)
    entry = catalog.find(options.model)
    assert entry is not None
    facts = dict(entry.config)
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.device("cpu" if options.cpu else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rows = pack(data, options.tokens) if name == "packed" else None
    mean = sum(len(sample["input_ids"]) for sample in data) / len(data)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder, per_device_train_batch_size=options.batch, max_steps=options.steps + _WARM_UP,
                bf16=not options.cpu, use_cpu=options.cpu, report_to="none", save_strategy="no", logging_steps=1,
                disable_tqdm=True, train_sampling_strategy="sequential",
            ),
            train_dataset=rows if rows is not None else data,
            data_collator=rows.collate if rows is not None else padded,
            callbacks=[clock],
        )  # fmt: skip
        trainer = trainer if name == "padded" else apply(trainer, padding_free=True)
        step = trainer.training_step

        def counting(model: Any, inputs: Any, *words: Any, **named: Any) -> Any:
            mask = inputs.get("attention_mask")
            clock.tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
            return step(model, inputs, *words, **named)

        trainer.training_step = counting
        trainer.train()
    peak = 0 if options.cpu else torch.cuda.max_memory_reserved()
    if not options.cpu:
        torch.cuda.reset_peak_memory_stats()
    return {
        "way": name, "tokens_per_second": round(clock.tokens / clock.seconds), "first_loss": clock.first_loss,
        "seconds": round(clock.seconds, 2), "tokens": clock.tokens, "mean_length": round(mean, 1),
        "peak_reserved_gib": round(peak / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    """Measure the three ways, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    parser.add_argument("--tokens", type=int, default=1024, help="the longest sample, and a row")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    entry = catalog.find(options.model)
    assert entry is not None, options.model
    # Packed rows take about three samples each.
    count = options.batch * (options.steps + _WARM_UP) * 4
    data = samples(count, options.tokens, int(entry.config["vocab_size"]))
    found = [measured(name, data, options) for name in ("padded", "padding-free", "packed")]
    for each in found:
        each["gain"] = round(each["tokens_per_second"] / found[0]["tokens_per_second"], 2)
        print(json.dumps(each))
    device = "cpu" if options.cpu else torch.cuda.get_device_name()
    options.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "ways": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
