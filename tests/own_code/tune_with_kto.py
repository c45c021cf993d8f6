"""Fine-tuning on single judgements with TRL's KTOTrainer; its options are those of KTOConfig."""

from __future__ import annotations

import copy

from datasets import Dataset
from tiny_language_model import make_model, make_tokenizer, texts
from transformers import HfArgumentParser
from trl import KTOConfig, KTOTrainer

if __name__ == "__main__":
    (arguments,) = HfArgumentParser(KTOConfig).parse_args_into_dataclasses()
    tokenizer = make_tokenizer()
    judged = [number % 2 == 0 for number in range(200)]
    data = Dataset.from_dict({"prompt": texts(200), "completion": texts(201)[1:], "label": judged})
    model = make_model(tokenizer)
    # TRL would load the model that it compares with by its name.
    trainer = KTOTrainer(model, copy.deepcopy(model), args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
