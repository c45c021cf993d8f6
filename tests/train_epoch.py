"""One epoch of a stock ``Trainer`` over jsonl texts, under the memory limit that trials had; prints what it saw."""

import json
import sys
import tempfile

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from autotune.worker.trial.meter import CpuMeter


def main() -> None:
    """Arguments: file, tokenizer, exported JSON, limit in bytes, tokens a sample at most, the model's folder."""
    file, tokenizer_folder, exported, cap_bytes, seq_len, model_folder = sys.argv[1:]
    with open(exported) as stream:
        tuned = json.load(stream)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = AutoConfig.from_pretrained(model_folder)
    with tempfile.TemporaryDirectory() as folder:
        data = load_dataset("json", data_files=file, split="train", cache_dir=folder).map(
            lambda row: tokenizer(row["text"], truncation=True, max_length=int(seq_len))
        )
        meter = CpuMeter()
        meter.limit(int(cap_bytes))
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
        arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=1, save_strategy="no", report_to="none", disable_tqdm=True, **tuned
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer)
        )
        trainer.train()
        print(json.dumps({"steps": trainer.state.global_step, "peak_bytes": meter.peaks().reserved}))


if __name__ == "__main__":
    main()
