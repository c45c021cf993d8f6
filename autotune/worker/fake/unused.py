"""Find out on fake tensors whether DDP must search for unused parameters or broadcast buffers."""

from __future__ import annotations

import sys
import traceback

import torch

from autotune.core.inspection import AfterStep
from autotune.core.workload import Workload
from autotune.worker.fake.build import build_fake_model
from autotune.worker.private.torch import fake_tensor_mode
from autotune.worker.private.transformers import decide_masks_without_values
from autotune.worker.trial.synthetic import synthetic_dataset


def what_ddp_can_skip(workload: Workload) -> AfterStep:
    """Return the parameters without a gradient after a step, and the buffers that it changes.

    DDP waits for a gradient of every parameter, unless it looks in each step for those that have none; and it sends all
    buffers from rank 0 to the others before each step. Changes how this process computes attention masks, so it belongs
    into one that ends soon.
    """
    try:
        return _after_a_step(workload)
    except Exception:
        # Operations that need values. DDP then does both, as it does by default.
        traceback.print_exc(file=sys.stderr)
        return AfterStep()


def _after_a_step(workload: Workload) -> AfterStep:
    decide_masks_without_values(padded=workload.padding > 0)
    with fake_tensor_mode():
        model = build_fake_model(workload)
        sample = synthetic_dataset(workload, model, 1, 0)[0]
        batch = {name: torch.zeros((2, *value.shape), dtype=value.dtype) for name, value in sample.items()}
        before = [(name, buffer, int(buffer._version)) for name, buffer in model.named_buffers()]
        model(**batch).loss.backward()
        after: dict[str, torch.Tensor] = dict(model.named_buffers())
    unused = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    changed = [name for name, was, version in before if was._version != version or after.get(name) is not was]
    return AfterStep(tuple(unused), tuple(changed))
