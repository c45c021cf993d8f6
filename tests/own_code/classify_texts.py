"""Fine-tunes a classifier of texts, as Hugging Face's example scripts do: it knows nothing of autotune."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class DataTrainingArguments:
    """What is read, and how."""

    train_file: str = field(metadata={"help": "A csv or json file with the columns text and label."})
    validation_file: str | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    max_seq_length: int = field(default=32, metadata={"help": "Longer texts are cut."})


@dataclass
class ModelArguments:
    """What is trained."""

    hidden_size: int = field(default=32, metadata={"help": "Width of the model."})
    num_hidden_layers: int = field(default=2, metadata={"help": "Depth of the model."})


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A small word-piece vocabulary of these texts."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def main() -> None:
    """Parse, load, train, save, evaluate."""
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()

    logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stdout)])
    logger.warning("device: %s, 16-bits training: %s", training_args.device, training_args.fp16)

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is None and len(os.listdir(training_args.output_dir)) > 0:
            raise ValueError(f"Output directory ({training_args.output_dir}) already exists and is not empty.")

    set_seed(training_args.seed)
    data_files = {"train": data_args.train_file}
    if data_args.validation_file is not None:
        data_files["validation"] = data_args.validation_file
    raw_datasets = load_dataset(data_args.train_file.split(".")[-1], data_files=data_files)
    label_list = sorted(raw_datasets["train"].unique("label"))
    tokenizer = train_tokenizer(raw_datasets["train"]["text"])
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=2,
        intermediate_size=4 * model_args.hidden_size,
        num_labels=len(label_list),
    )
    model = BertForSequenceClassification(config)

    def preprocess_function(examples: dict) -> dict:
        result = tokenizer(examples["text"], max_length=data_args.max_seq_length, truncation=True)
        result["labels"] = [label_list.index(label) for label in examples["label"]]
        return result

    with training_args.main_process_first(desc="dataset map pre-processing"):
        raw_datasets = raw_datasets.map(
            preprocess_function, batched=True, remove_columns=["label"], desc="Running tokenizer on dataset"
        )

    def compute_metrics(p: EvalPrediction) -> dict:
        return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=raw_datasets["train"] if training_args.do_train else None,
        eval_dataset=raw_datasets["validation"] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )

    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", train_result.metrics)
        trainer.save_metrics("train", train_result.metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=raw_datasets["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    trainer.create_model_card()


if __name__ == "__main__":
    main()
