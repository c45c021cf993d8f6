"""LoRA adapters of peft over a causal language model, trained with transformers' Trainer."""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from tiny_language_model import make_model, make_tokenizer, texts
from transformers import DataCollatorForLanguageModeling, HfArgumentParser, Trainer, TrainingArguments

if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    tokenizer = make_tokenizer()
    model = get_peft_model(make_model(tokenizer), LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[tokenizer(text) for text in texts(200)],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    model.save_pretrained(arguments.output_dir)
