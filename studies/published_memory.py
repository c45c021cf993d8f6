"""Compare predicted with published peaks of memory of fine-tuning, on cards of 16 to 24 GB that were not at hand.

    python studies/published_memory.py [--storage FILE]

``studies/landscapes/published_memory.json`` has each row with its source and settings. None had a part in a fit.
A verdict is right where the published training ran and is predicted to fit, or ran out of memory and is not. The
columns "as theirs" add what a published training held by settings that ``autotune predict`` has no options for.
Needs peft; no GPU. The answers are kept in the database of studies, so that a second run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorded_steps import LANDSCAPES

from autotune.core.errors import NothingFitsError

MIB = 2**20
# Bytes of a weight in nf4: constants of 4 bytes for 64 weights, or of 1 byte with one of 4 bytes for 256 of them.
_ONCE = 4 / 64
_TWICE = 1 / 64 + 4 / 64 / 256


@dataclass(frozen=True)
class Answer:
    """The predicted peaks of a row, and the limit below which a peak fits, in MiB."""

    allocated_mib: float
    reserved_mib: float
    limit_mib: float


def settings(row: Mapping[str, Any], source: Mapping[str, str]) -> list[str]:
    """Return the options of ``autotune predict`` for the training of a row."""
    chosen = ["--seq-len", str(row["seq_len"]), "--effective-batch", str(row["batch"]), "--batch-multiple", "1"]
    chosen += ["--gradient-checkpointing", "on" if row["checkpointing"] else "off", "--attn", row["attn"]]
    chosen += ["--optim", "adamw_torch", "--headroom", "0", "--all", "--json"]
    chosen += ["--memory-limit", source["limit"]] if "limit" in source else ["--gpu", source["gpu"]]
    if row["way"] != "full":
        chosen += ["--peft", "lora", "--lora-rank", str(row["rank"])]
        chosen += ["--lora-targets", row["targets"]] if "targets" in row else []
    if row["way"] == "QLoRA":
        chosen += ["--quantize", "4bit"]
    elif row["way"] == "LoRA, 8 bits":
        chosen += ["--quantize", "8bit"]
    return chosen + list(_DTYPES[row["source"], row["way"] == "LoRA"])


# Weights that are not quantized were made float32 by peft's prepare_model_for_kbit_training; or all are in 16 bits.
_DTYPES = {
    ("fitcheck", False): ("--dtype", "float32", "--precision", "fp32"),
    ("fitcheck", True): ("--dtype", "float16", "--precision", "fp32"),
    ("transformers", False): ("--dtype", "float32", "--precision", "fp16"),
    ("litgpt", False): ("--dtype", "bfloat16", "--precision", "bf16"),
    ("litgpt", True): ("--dtype", "bfloat16", "--precision", "bf16"),
}


def predicted(row: Mapping[str, Any], data: Mapping[str, Any], storage: str | None) -> Answer:
    """Return the predicted memory of a row's training."""
    source = data["sources"][row["source"]]
    with tempfile.TemporaryDirectory() as folder:
        model = row["model"]
        if model in data["configs"]:
            model = Path(folder) / model
            model.mkdir()
            (model / "config.json").write_text(json.dumps(data["configs"][row["model"]]), encoding="utf-8")
        command = [sys.executable, "-m", "autotune", "predict", "--model", str(model), *settings(row, source)]
        command += ["--storage", storage] if storage else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == NothingFitsError.exit_code:
        # Weights, gradients and the optimizer's state alone exceed the limit.
        return Answer(math.inf, math.inf, 0.0)
    if done.returncode:
        raise SystemExit(f"{row['model']}, {row['way']}: {done.stderr}")
    (gpu,) = json.loads(done.stdout)["gpus"]
    (arm,) = gpu["arms"]
    batch = next(b for b in arm["batches"] if b["per_device_train_batch_size"] == row["batch"])
    figures = batch["peak_allocated_bytes"], batch["peak_reserved_bytes"], gpu["fits_below_bytes"]
    return Answer(*(figure / MIB for figure in figures))


def left_out_mib(row: Mapping[str, Any], data: Mapping[str, Any]) -> float:
    """Return the MiB that a published training held by settings that ``autotune predict`` has no options for.

    Logits during the backward pass, and constants of weights in nf4 that are not quantized themselves.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from autotune.models.resolve import resolve_model

    config = dict(data["configs"].get(row["model"]) or resolve_model(row["model"]).config)
    left_out = 0.0
    if row["source"] == "fitcheck":
        logits = row["batch"] * row["seq_len"] * config["vocab_size"]
        left_out += logits * (2 if row["way"] == "LoRA" else 4)
    if row["way"] == "QLoRA":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        head = model.get_output_embeddings()
        quantized = sum(m.weight.numel() for m in model.modules() if type(m) is torch.nn.Linear and m is not head)
        left_out += quantized * (_ONCE - _TWICE)
    return left_out / MIB


def main() -> None:
    """Print each row with its prediction, and how many verdicts are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="database that the answers are kept in")
    storage = parser.parse_args().storage
    data = json.loads((LANDSCAPES / "published_memory.json").read_text(encoding="utf-8"))
    head = (
        f"{'source':<13}{'model':<26}{'way':<13}{'tokens':>6}{'batch':>6}{'attn':>7}{'peak, MiB':>11}{'predicted':>11}"
    )
    print(f"{head}{'error':>8}{'as theirs':>11}  {'published':<11}{'predicted':<11}{'as theirs':<9}")
    right, as_theirs, errors = 0, 0, []
    for row in data["rows"]:
        answer, more = predicted(row, data, storage), left_out_mib(row, data)
        plain, fits = (answer.reserved_mib + held <= answer.limit_mib for held in (0.0, more))
        right += plain == row["fits"]
        as_theirs += fits == row["fits"]
        told = (
            f"{row['source']:<13}{row['model']:<26}{row['way']:<13}{row['seq_len']:>6}{row['batch']:>6}{row['attn']:>7}"
        )
        published = row.get("allocated_mib") or row.get("reserved_mib")
        ours = answer.allocated_mib if "allocated_mib" in row else answer.reserved_mib
        if published and math.isfinite(ours):
            error, explained = ours / published - 1, (ours + more) / published - 1
            errors.append((row["source"], error, explained))
            told += f"{published:>11,.0f}{ours:>11,.0f}{error:>+8.1%}{explained:>+11.1%}"
        else:
            told += f"{'':>11}{ours:>11,.0f}{'':>19}"
        wrong = "" if fits == row["fits"] else "  wrong"
        print(f"{told}  {_word(row['fits']):<11}{_word(plain):<11}{_word(fits)}{wrong}", flush=True)
    count = len(data["rows"])
    print(
        f"\nverdicts: {right} of {count} right ({right / count:.0%}); as theirs {as_theirs} ({as_theirs / count:.0%})"
    )
    for source in data["sources"]:
        own = [(abs(error), abs(explained)) for name, error, explained in errors if name == source]
        if own:
            medians = [statistics.median(each) for each in zip(*own, strict=True)]
            print(f"{source}: {len(own)} peaks, median error {medians[0]:.1%}, as theirs {medians[1]:.1%}")


def _word(fits: bool) -> str:
    return "fits" if fits else "does not"


if __name__ == "__main__":
    main()
