"""Find the parameters that get no gradient in a training step, on fake tensors: without memory, values or a GPU."""

from __future__ import annotations

import dataclasses
import sys
import traceback

import torch

from autotune.core.workload import Workload
from autotune.worker.private.torch import fake_tensor_mode
from autotune.worker.private.transformers import decide_masks_without_values
from autotune.worker.trial.build import build_model
from autotune.worker.trial.synthetic import synthetic_dataset


def unused_parameters(workload: Workload) -> list[str] | None:
    """Return the names of trainable parameters without a gradient after a step; ``None`` where no step can be run.

    DDP waits for a gradient of every parameter, unless it looks in each step for those that have none. Changes how
    this process computes attention masks, so it belongs into one that ends soon.
    """
    try:
        return _unused(dataclasses.replace(workload, weights=None))
    except Exception:
        # Operations that need values. DDP then looks for unused parameters, as it does by default.
        traceback.print_exc(file=sys.stderr)
        return None


def _unused(workload: Workload) -> list[str]:
    decide_masks_without_values(padded=workload.padding > 0)
    with fake_tensor_mode():
        model = build_model(workload, "eager" if workload.task == "seq2seq-lm" else "sdpa", torch.device("cpu"))
        sample = synthetic_dataset(workload, model, 1, 0)[0]
        batch = {name: torch.zeros((2, *value.shape), dtype=value.dtype) for name, value in sample.items()}
        model(**batch).loss.backward()
    return [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
