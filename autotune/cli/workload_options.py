"""The options about what is trained and what is tried that a search and a prediction share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from autotune.cli.options import COUNT, HEADROOM, SHARE, words
from autotune.core.workload import TASKS

# By parameter name: the type, the help, and what else click is told.
_OPTIONS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "model": (
        str,
        "Catalog name (autotune models), folder with a config.json, or hub name.",
        {"metavar": "NAME|FOLDER"},
    ),
    "effective_batch": (
        COUNT,
        "Per-device batch × accumulation × world size, kept exactly. Without it accumulation is 1 and the batch free.",
        {},
    ),
    "task": (
        click.Choice(TASKS),
        f"One of {', '.join(TASKS)} [default: as the architecture says].",
        {"metavar": "TASK"},
    ),
    "seq_len": (COUNT, "Tokens a sample [default: 512 or the model's maximum].", {}),
    "padding": (
        SHARE,
        "Mean share of each text sample that is padding, with a real attention_mask [default: 0].",
        {},
    ),
    "dtype": (
        click.Choice(("float32", "bfloat16", "float16")),
        "What the weights are stored in; precision is the autocast over it.",
        {"default": "float32", "show_default": True},
    ),
    "peft": (click.Choice(("lora",)), "Train LoRA adapters on all linear layers, not the weights.", {}),
    "lora_rank": (COUNT, "Rank of the adapters [default: 16].", {}),
    "headroom": (HEADROOM, "Kept free below the limit, e.g. 5% or 1GiB [default: 3%].", {}),
    "world_size": (COUNT, "Do the arithmetic of so many devices.", {"default": "1", "show_default": True}),
    "precision": (
        words(("fp32", "tf32", "fp16", "bf16")),
        "E.g. bf16,tf32 [default: all that the device has].",
        {},
    ),
    "gradient_checkpointing": (
        click.Choice(("auto", "on", "off")),
        "Both ways, always, never.",
        {"default": "auto", "show_default": True},
    ),
    "attn": (words(), "Attention implementations, e.g. sdpa,eager [default: sdpa if there is one].", {}),
    "optim": (words(), "Values of TrainingArguments.optim [default: adamw_torch_fused].", {}),
    "batch_multiple": (COUNT, "Per-device batches are multiples of it [default: 8, then 4, 2, 1].", {}),
}


def workload_options(*names: str, **remarks: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the options of these parameter names, in this order; some with a remark at the end of their help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            kind, text, settings = _OPTIONS[name]
            text = f"{text} {remarks[name]}" if name in remarks else text
            command = click.option("--" + name.replace("_", "-"), type=kind, help=text, **settings)(command)
        return command

    return decorate
