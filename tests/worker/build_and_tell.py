"""Build a language model of 0.4 GiB on the CPU, and print its weights' bytes and what building took of the host."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  (its code is no part of building)
from tiny import tiny_workload

from autotune.worker.trial.build import build_model
from autotune.worker.trial.meter import most_host_bytes

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 12}

if __name__ == "__main__":
    changes: dict[str, Any] = json.loads(sys.argv[1])
    config = {**SIZES, "num_key_value_heads": 8, "vocab_size": 16384}
    workload = dataclasses.replace(tiny_workload("llama-tiny", config=config, dtype="bfloat16"), **changes)
    before = most_host_bytes() or 0
    model = build_model(workload, "eager", torch.device("cpu"))
    # Saved weights are mapped, and read as they are used.
    total = sum(float(p.detach().sum()) for p in model.parameters())
    took = (most_host_bytes() or 0) - before
    print(json.dumps({"weights": sum(p.nbytes for p in model.parameters()), "took": took, "total": total}))
    if len(sys.argv) > 2:
        model.save_pretrained(sys.argv[2], max_shard_size="200MB")
