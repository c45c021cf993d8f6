"""A tiny GPT-2 and its tokenizer, made in memory, for scripts that would load them from the hub."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = [f"word{number}" for number in range(100)]


def texts(count: int) -> list[str]:
    """Return texts of 16 random words."""
    choose = random.Random(0)
    return [" ".join(choose.choices(WORDS, k=16)) for _ in range(count)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", bos_token="[CLS]", eos_token="[SEP]", model_max_length=64,
    )  # fmt: skip


def make_model(tokenizer: Any) -> Any:
    """Return a model with random weights."""
    config = AutoConfig.for_model(
        "gpt2", n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)
