"""Fine-tunes a sequence-to-sequence model with ``Seq2SeqTrainer``; knows nothing of autotune."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = ["<pad>", "</s>", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@dataclass
class DataArguments:
    """What is read."""

    samples: int = field(default=96)
    target_length: int = field(default=4)


def main() -> None:
    """Learns to repeat the first words."""
    parser = HfArgumentParser((DataArguments, Seq2SeqTrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0,
                 eos_token_id=1, decoder_start_token_id=0)
    )  # fmt: skip
    random.seed(0)
    texts = [" ".join(random.choices(WORDS[2:], k=random.randint(4, 12))) for _ in range(data_args.samples)]

    def encode(batch: dict) -> dict:
        targets = [" ".join(text.split()[: data_args.target_length]) for text in batch["text"]]
        return {**tokenizer(batch["text"]), "labels": tokenizer(targets)["input_ids"]}

    data = Dataset.from_dict({"text": texts}).map(encode, batched=True, remove_columns=["text"])
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    trainer.train()
    trainer.save_model()
    print("all done")


if __name__ == "__main__":
    main()
