"""Fine-tune on texts of different lengths, as people write such a script, and print the speed of the run.

    python studies/texts_script.py --workload bert-base --bf16 --clock_to 400 --output_dir out
    autotune search --effective-batch 32 -- python studies/texts_script.py --workload bert-base --output_dir out

Options other than those of ``Script`` are those of ``TrainingArguments``. Models have the sizes of their names and
random weights; tokens are random. Lengths are log-normal with a mean of about a third of the longest, as texts have. A
batch is padded to its longest sample. The last line is ``SPEED`` and a JSON document: samples a second by the script's
own clock.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.nn.functional import pad
from transformers import AutoConfig, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, set_seed

_BERT = {"model_type": "bert"}
_QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}  # fmt: skip
_LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 4096,
}  # fmt: skip
_ROBERTA = {
    "model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1,
    "pad_token_id": 1,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0,
}  # fmt: skip
_GPT2 = {"model_type": "gpt2"}
_MODERNBERT = {"model_type": "modernbert"}
_DEBERTA = {
    "model_type": "deberta-v2", "vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "intermediate_size": 3072, "relative_attention": True, "position_buckets": 256,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
    "max_relative_positions": -1, "position_biased_input": False, "pooler_hidden_size": 768,
}  # fmt: skip
_BART = {"model_type": "bart", "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072,
         "decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12}  # fmt: skip
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


@dataclass(frozen=True)
class Workload:
    """What is trained: a model's config, its task, the longest text in tokens."""

    config: dict[str, Any]
    task: str
    longest: int
    weights: torch.dtype = torch.float32
    lora: bool = False


WORKLOADS = {
    "bert-base": Workload(_BERT, "classification", 512),
    "qwen-0.5b": Workload(_QWEN, "causal", 1024),
    "roberta-base": Workload(_ROBERTA, "masked", 512),
    "t5-base": Workload(_T5, "seq2seq", 512),
    "llama-1b": Workload(_LLAMA_1B, "causal", 2048, torch.bfloat16),
    "llama-8b-lora": Workload(_LLAMA_8B, "causal", 1024, torch.bfloat16, lora=True),
    "gpt2": Workload(_GPT2, "causal", 1024),
    "modernbert-base": Workload(_MODERNBERT, "classification", 1024),
    "deberta-v3-base": Workload(_DEBERTA, "classification", 512),
    "bart-base": Workload(_BART, "seq2seq", 512),
    "gpt2-small": Workload({**_GPT2, "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000}, "causal", 64),
    "modernbert-small": Workload(
        {
            **_MODERNBERT,
            **_SMALL,
            "vocab_size": 1000,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        "classification",
        64,
    ),
    "deberta-small": Workload(
        {**_DEBERTA, **_SMALL, "pooler_hidden_size": 64, "vocab_size": 1000}, "classification", 64
    ),
    "bart-small": Workload(
        {
            **_BART,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "vocab_size": 1000,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        },
        "seq2seq",
        64,
    ),
    "bert-small": Workload({**_BERT, **_SMALL, "vocab_size": 1000}, "classification", 64),
    "qwen-small": Workload({**_QWEN, **_SMALL, "num_key_value_heads": 2, "vocab_size": 1000}, "causal", 64),
    "roberta-small": Workload({**_ROBERTA, **_SMALL, "vocab_size": 1000}, "masked", 64),
}
_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
_SAMPLES = 65_536
_IGNORED = -100


@dataclass
class Script:
    """The script's own options."""

    workload: str = field(default="bert-base")
    clock_from: int = field(default=100, metadata={"help": "the step after which the clock starts"})
    clock_to: int = field(default=-1, metadata={"help": "the step after which the training ends; -1: the last"})
    clock_seconds: float = field(default=1e9, metadata={"help": "end the training after so many seconds on the clock"})


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Random tokens of log-normal lengths."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        random = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(5, 1000, (1024, workload.longest), generator=random)
        spread = torch.randn(_SAMPLES, 2, generator=random) * 0.7
        self._lengths = (spread.exp() * (workload.longest / 3.8)).clamp(8, workload.longest).long()

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one text, with labels by the task."""
        tokens = self._tokens[index % len(self._tokens)]
        text = tokens[: int(self._lengths[index, 0])]
        match self._workload.task:
            case "classification":
                labels = torch.tensor(index % 2)
            case "seq2seq":
                labels = tokens[: max(8, int(self._lengths[index, 1]) // 4)]
            case _:
                labels = text
        return {"input_ids": text, "labels": labels}


def collate(samples: list[dict[str, Any]], task: str) -> dict[str, torch.Tensor]:
    """Pad the samples of a batch to the longest."""

    def padded(name: str, value: int) -> torch.Tensor:
        longest = max(len(sample[name]) for sample in samples)
        return torch.stack([pad(sample[name], (0, longest - len(sample[name])), value=value) for sample in samples])

    tokens = padded("input_ids", 1 if task == "masked" else 0)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    batch = {"input_ids": tokens, "attention_mask": mask}
    if task == "classification":
        return {**batch, "labels": torch.stack([sample["labels"] for sample in samples])}
    labels = padded("labels", _IGNORED)
    if task == "masked":
        # 15 % of the tokens are predicted.
        is_predicted = (torch.rand(tokens.shape) < 0.15) & mask.bool()
        labels = torch.where(is_predicted, tokens, _IGNORED)
        batch["input_ids"] = torch.where(is_predicted, 4, tokens)
    return {**batch, "labels": labels}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Measures samples a second from a step on, until the training ends or enough seconds have passed."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._began = time.perf_counter()
        self._from: tuple[int, float] | None = None
        self._first_seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Read the clock, and print it at the end."""
        if state.global_step == 1:
            self._first_seconds = time.perf_counter() - self._began
        is_first = state.global_step == self._script.clock_from
        is_last = state.global_step in (state.max_steps, self._script.clock_to)
        if self._from is not None and not is_last:
            is_last = time.perf_counter() - self._from[1] > self._script.clock_seconds
        if not (is_first or is_last):
            return control
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if is_first:
            self._from = state.global_step, now
        elif self._from is not None:
            step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            steps, seconds = state.global_step - self._from[0], now - self._from[1]
            told = {
                "workload": self._script.workload,
                "per_device_train_batch_size": args.per_device_train_batch_size,
                "gradient_accumulation_steps": args.gradient_accumulation_steps,
                "from_step": self._from[0],
                "to_step": state.global_step,
                "samples_per_second": round(steps * step / seconds, 2),
                "before_seconds": round(self._from[1] - self._began, 1),
                "first_step_seconds": round(self._first_seconds, 1),
                "whole_samples_per_second": round(state.global_step * step / (now - self._began), 2),
                "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)
                if torch.cuda.is_available()
                else None,
            }
            print("SPEED " + json.dumps(told), flush=True)
            control.should_training_stop = True
        return control


def main() -> None:
    """Train."""
    script, args = HfArgumentParser((Script, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    workload = WORKLOADS[script.workload]
    config = AutoConfig.for_model(**workload.config)
    config.use_cache = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = getattr(transformers, _CLASSES[workload.task]).from_config(config, dtype=workload.weights)
    if workload.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Texts(workload),
        data_collator=lambda samples: collate(samples, workload.task),
        callbacks=[Clock(script)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
