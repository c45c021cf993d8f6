"""A reward model of preferences with TRL's RewardTrainer; its options are those of RewardConfig."""

from __future__ import annotations

from datasets import Dataset
from tiny_language_model import make_model, make_tokenizer, texts
from transformers import AutoModelForSequenceClassification, HfArgumentParser
from trl import RewardConfig, RewardTrainer

if __name__ == "__main__":
    (arguments,) = HfArgumentParser(RewardConfig).parse_args_into_dataclasses()
    tokenizer = make_tokenizer()
    data = Dataset.from_dict({"chosen": texts(200), "rejected": texts(201)[1:]})
    config = make_model(tokenizer).config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    trainer = RewardTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
