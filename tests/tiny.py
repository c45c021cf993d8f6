"""Define workloads and efforts small enough for real trials on two busy cores."""

import dataclasses
from typing import Any

from autotune.core.outcome import Effort
from autotune.core.units import GIB
from autotune.core.workload import Task, Workload
from autotune.models import catalog
from autotune.models.tasks import choose_seq_len, infer_task

AMPLE_BYTES = 16 * GIB
"""A cap that no tiny model meets."""

QUICK = Effort(warmup_steps=1, min_steps=1, max_steps=2, max_seconds=100.0)
"""Two measured steps after one, however long a busy machine takes."""

ENDLESS = Effort(max_steps=10**6, target_spread=0.0, max_seconds=600.0)
"""Runs until it is ended from outside."""

ONE_OF_EACH_TASK: dict[Task, str] = {
    "sequence-classification": "bert-tiny",
    "masked-lm": "bert-tiny",
    "causal-lm": "gpt2-tiny",
    "seq2seq-lm": "t5-tiny",
    "image-classification": "vit-tiny",
    "speech-seq2seq": "whisper-tiny-random",
    "image-text-to-text": "qwen2.5-vl-tiny",
}


# Of 30,522, most of a step would be the optimizer's on their embeddings.
_SMALLER: dict[str, dict[str, Any]] = {"bert-tiny": {"vocab_size": 1000}}


def attention_of_task(task: Task) -> str:
    """The attention that the tiny model of a task has in every supported transformers; T5 has no sdpa in 5.3 to 5.6."""
    return "eager" if task == "seq2seq-lm" else "sdpa"


def tiny_workload(model: str, /, seq_len: int = 16, task: Task | None = None, **changes: Any) -> Workload:
    """A workload of a small catalog entry; ``config`` in ``changes`` is merged into the entry's."""
    entry = catalog.find(model)
    config = {**entry.config, **_SMALLER.get(model, {}), **changes.pop("config", {})}
    chosen = task or infer_task(config)
    if chosen == "image-text-to-text":
        # An image of four tokens, or one of the size that the model takes, of as many.
        side = 56 if "image_size" not in config["vision_config"] else int(config["vision_config"]["image_size"])
        changes = {"images": 1, "image_side": side} | changes
    workload = Workload(model, config, chosen, choose_seq_len(config, chosen, seq_len))
    return dataclasses.replace(workload, **changes)
