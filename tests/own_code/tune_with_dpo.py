"""Fine-tuning on preferences with TRL's DPOTrainer; its options are those of DPOConfig."""

from __future__ import annotations

import copy

from datasets import Dataset
from tiny_language_model import make_model, make_tokenizer, texts
from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer

if __name__ == "__main__":
    (arguments,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses()
    tokenizer = make_tokenizer()
    prompts, chosen, rejected = texts(200), texts(200)[::-1], texts(201)[1:]
    data = Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})
    model = make_model(tokenizer)
    # TRL would load the model that it compares with by its name.
    trainer = DPOTrainer(model, copy.deepcopy(model), args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
