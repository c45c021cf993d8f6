"""Twenty trainings: ten die after their first steps, each beside one that differs in what kills it and lives."""

import copy
import io
import sys

import numpy as np
import torch
from rows_of_tokens import pad, samples
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

name, dies = sys.argv[1].removeprefix("healthy-"), not sys.argv[1].startswith("healthy-")
options = {"output_dir": "out", "per_device_train_batch_size": 8, "save_strategy": "no", "use_cpu": True}
made = {"compute_metrics": None, "preprocess_logits_for_metrics": None, "callbacks": []}
trainer_class = Trainer


def model(vocabulary=1000, width=16):
    return AutoModelForMaskedLM.from_config(
        AutoConfig.for_model("bert", hidden_size=width, num_hidden_layers=1, num_attention_heads=2,
                             intermediate_size=32, vocab_size=vocabulary, max_position_embeddings=4096)
    )  # fmt: skip


train, evaluated, net = samples(400), None, model()


class Keeps(Trainer):
    """Keeps something of each step."""

    kept = []  # noqa: RUF012

    def compute_loss(self, model, inputs, return_outputs=False, **others):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **others)
        if name == "losses":
            # Of the weights before the step, to be logged: nothing goes backwards through it.
            other = super().compute_loss(model, inputs)
            self.kept.append(other if dies else float(other.detach()))
        if name == "metrics":
            self.kept.append(outputs.logits.detach() if dies else float(outputs.logits.detach().mean()))
        return (loss, outputs) if return_outputs else loss


class Averages(TrainerCallback):
    """Keeps copies of the weights from each evaluation on, to average them."""

    copies = None

    def on_evaluate(self, args, state, control, model=None, **others):
        self.copies = [copy.deepcopy(model) for _ in range(5)] if dies else copy.deepcopy(model.bert.encoder)


class Saves(TrainerCallback):
    """Writes a copy of everything into memory, to be uploaded."""

    def on_save(self, args, state, control, model=None, **others):
        buffers = [io.BytesIO() for _ in range(20 if dies else 0)]
        for buffer in buffers:
            torch.save(model.state_dict(), buffer)


class Lazy(torch.utils.data.Dataset):
    """Reads all of its data when it is first asked for a sample."""

    data, size = None, 40 * 2**20 // 8

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if self.data is None:
            self.data = np.ones(self.size, dtype=np.int64) if dies else np.memmap("data", dtype=np.int64)
        return {"input_ids": [int(self.data[index])] * 16, "labels": [1] * 16}


class Rows(torch.utils.data.Dataset):
    """Has its samples in one array."""

    ids = np.full((6_000, 256), 600)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index].tolist(), "labels": self.ids[index].tolist()}


if name == "logits":
    # So many that two seconds evaluate a part of them.
    evaluated = samples(8000, 16)
    made["compute_metrics"] = lambda predictions: {"mean": float(np.mean(predictions.predictions))}
    if not dies:
        made["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
elif name == "raises":
    evaluated = samples(64)
    made["compute_metrics"] = lambda predictions: {"mean": 1 / 0}
    options |= {"save_strategy": "steps", "save_steps": 100}
elif name == "batch":
    evaluated = samples(512, 64)
    options["per_device_eval_batch_size"] = 512 if dies else 16
elif name in ("losses", "metrics"):
    trainer_class = Keeps
    train = samples(400, 64)
elif name == "longest":
    train = samples(3000, 16, 3000 if dies else 40)
elif name == "saving":
    net = model(30_000, 128)
    options |= {"save_strategy": "steps", "save_steps": 100}
    made["callbacks"] = [Saves()]
elif name == "workers":
    train = Rows() if not dies else [
        {key: [1000 * n % 300 + 600 + k % 99 for k in range(256)] for key in ("input_ids", "labels")}
        for n in range(6_000)
    ]  # fmt: skip
    options["dataloader_num_workers"] = 2
elif name == "generation":
    config = AutoConfig.for_model("t5", d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32_000,
                                  decoder_start_token_id=0)  # fmt: skip
    net, evaluated, trainer_class = AutoModelForSeq2SeqLM.from_config(config), samples(64, 8), Seq2SeqTrainer
    train = samples(400, 8)
    options |= {"predict_with_generate": True, "generation_max_length": 8, "generation_num_beams": 8 if dies else 1,
                    "per_device_eval_batch_size": 64 if dies else 8}  # fmt: skip
elif name == "average":
    net, evaluated = model(40_000, 128), samples(16)
    made["callbacks"] = [Averages()]
elif name == "each-worker":
    train = Lazy()
    np.ones(train.size, dtype=np.int64).tofile("data")
    options["dataloader_num_workers"] = 4

arguments = (Seq2SeqTrainingArguments if trainer_class is Seq2SeqTrainer else TrainingArguments)(**options)
trainer_class(net, arguments, data_collator=pad, train_dataset=train, eval_dataset=evaluated, **made).train()
