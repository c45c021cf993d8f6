"""Supervised fine-tuning with TRL's SFTTrainer, on texts; its options are those of SFTConfig."""

from __future__ import annotations

from datasets import Dataset
from tiny_language_model import make_model, make_tokenizer, texts
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

if __name__ == "__main__":
    (arguments,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
    tokenizer = make_tokenizer()
    data = Dataset.from_dict({"text": texts(200)})
    trainer = SFTTrainer(make_model(tokenizer), args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
