"""Reinforcement learning with TRL's GRPOTrainer and a reward in plain Python; its options are those of GRPOConfig."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from tiny_language_model import make_model, make_tokenizer, texts
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: Any) -> list[float]:
    """Reward completions of many different words."""
    return [float(len(set(text.split()))) for text in completions]


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
    tokenizer = make_tokenizer()
    data = Dataset.from_dict({"prompt": texts(200)})
    trainer = GRPOTrainer(
        make_model(tokenizer), reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model()
