"""Trains a small model to repeat a word that was said long before, and prints the losses: ``share_samples.py ARM``.

``ARM`` is JSON. Of two ranks that share a sample the first has its outer quarters, the second the others. The word
stands in the second quarter, and is asked for in the last.
"""

import dataclasses
import json
import os
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

from autotune.core.candidate import Arm, Candidate
from autotune.space.arms import applied_settings
from autotune.space.training_arguments import launch_variables, training_arguments
from autotune.training import apply

TOKENS, WORDS = 256, 64


def samples(count: int) -> list[dict[str, Any]]:
    """Samples whose last quarter asks for the word of the second; zeros stand everywhere else."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for word in torch.randint(1, WORDS, (count,), generator=generator):
        row, labels = torch.zeros(TOKENS, dtype=torch.int64), torch.full((TOKENS,), -100)
        row[TOKENS // 4 : TOKENS // 2] = word
        labels[3 * TOKENS // 4 :] = word
        made.append({"input_ids": row, "labels": labels})
    return made


def train(arm: Arm) -> list[float]:
    """Return the loss of each step."""
    os.environ.update(launch_variables(arm))
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    # As many samples a step, however they are divided.
    candidate = Candidate(arm, 8, 2 // arm.data_parallel)
    arguments = TrainingArguments(
        **training_arguments(candidate, fields, "cuda"), output_dir=f"out-{os.getpid()}", max_steps=60, logging_steps=1,
        report_to="none", disable_tqdm=True, save_strategy="no", learning_rate=3e-3, lr_scheduler_type="constant",
    )  # fmt: skip
    set_seed(1)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    trainer = Trainer(model=model, args=arguments, train_dataset=samples(16 * 60))
    apply(trainer, **applied_settings(arm)).train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = train(Arm(**json.loads(sys.argv[1])))
    if os.environ.get("RANK", "0") == "0":
        print("\nlosses", json.dumps(losses), flush=True)
