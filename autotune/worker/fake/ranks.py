"""Find out on fake tensors what one rank of several holds, under DDP or FSDP2, and what DDP can skip."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from autotune.core.candidate import Arm
from autotune.core.inspection import AfterStep
from autotune.core.workload import Workload
from autotune.space.precision_names import ACCELERATE
from autotune.space.training_arguments import fsdp_settings
from autotune.worker.failures import first_line
from autotune.worker.fake.build import build_fake_model
from autotune.worker.private.accelerate import shard
from autotune.worker.private.torch import fake_tensor_mode, join_fake_ranks, start_sharding
from autotune.worker.private.transformers import decide_masks_without_values
from autotune.worker.trial.synthetic import synthetic_dataset

# kDefaultFirstBucketBytes in torch/csrc/distributed/c10d/reducer.hpp, and the default of bucket_cap_mb in
# torch/nn/parallel/distributed.py.
_FIRST_BUCKET_BYTES = 1024**2
_BUCKET_BYTES = 25 * 1024**2


def bucket_bytes(model: torch.nn.Module) -> Iterator[int]:
    """Yield the size of each of DDP's gradient buckets.

    DDP fills them in the reverse order of the parameters, and keeps them beside the gradients:
    ``gradient_as_bucket_view`` is off, and no field of ``TrainingArguments`` (compute_bucket_assignment_by_size and
    initialize_buckets in torch/csrc/distributed/c10d/reducer.cpp).
    """
    filled, least = 0, _FIRST_BUCKET_BYTES
    for parameter in reversed([parameter for parameter in model.parameters() if parameter.requires_grad]):
        filled += parameter.nbytes
        if filled >= least:
            yield filled
            filled, least = 0, _BUCKET_BYTES
    if filled:
        yield filled


def shard_model(model: Any, arm: Arm, mesh: Any) -> Any:
    """Return the model as rank 0 has it after ``Trainer.train`` began: sharded, with FSDP's own checkpointing."""
    return shard(model, fsdp_settings(arm), ACCELERATE[arm.precision], mesh)


def sums_of_parameters(model: torch.nn.Module, arm: Arm) -> Iterable[int]:
    """Return the sizes that several ranks allocate for parameters of several shapes together.

    Under FSDP these are one layer's, the embedding's and the rest; each whole, and as a rank's part.
    """
    if arm.strategy == "ddp":
        return set(bucket_bytes(model))
    layers = (arm.transformer_layer_cls_to_wrap or "").split(",")
    units = [module for module in model.modules() if type(module).__name__ in layers or hasattr(module, "weight")]
    held = {id(parameter) for unit in units if type(unit).__name__ in layers for parameter in unit.parameters()}
    sums = {_padded(unit.parameters(), arm.ranks) for unit in units}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in held]
    sums.add(_padded(outside, arm.ranks))
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    for table in tables:
        sums.add(_padded([parameter for parameter in outside if parameter is not table], arm.ranks))
    return {size for total in sums for size in (total, total // arm.ranks)}


def _padded(parameters: Iterable[torch.Tensor], ranks: int) -> int:
    """Return the elements of parameters whose rows are padded to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks) * ranks * (p.numel() // p.shape[0]) for p in parameters if p.numel() and p.dim())


def why_not_sharded(workload: Workload, layers: Sequence[str], ranks: int = 2) -> str | None:
    """Return why accelerate cannot shard a model by these classes of layers; ``None`` where it can.

    Models that share a weight between modules in an unusual way are an example. Joins a process group of ranks that do
    not exist, so it belongs into a process that ends soon.
    """
    arm = Arm(strategy="fsdp", ranks=ranks, transformer_layer_cls_to_wrap=",".join(layers))
    mesh = join_fake_ranks(ranks)
    try:
        with fake_tensor_mode():
            start_sharding(shard_model(build_fake_model(workload), arm, mesh))
    except Exception as error:
        return first_line(error)
    return None


def what_ddp_can_skip(workload: Workload) -> AfterStep:
    """Return the parameters without a gradient after a step, and the buffers that it changes.

    DDP waits for a gradient of every parameter, unless it looks in each step for those that have none; and it sends all
    buffers from rank 0 to the others before each step. Changes how this process computes attention masks, so it belongs
    into one that ends soon.
    """
    try:
        decide_masks_without_values(padded=workload.padding > 0)
        with fake_tensor_mode():
            model = build_fake_model(workload)
            sample = synthetic_dataset(workload, model, 1, 0)[0]
            batch = {name: torch.zeros((2, *value.shape), dtype=value.dtype) for name, value in sample.items()}
            before = [(name, buffer, int(buffer._version)) for name, buffer in model.named_buffers()]
            model(**batch).loss.backward()
            after: dict[str, torch.Tensor] = dict(model.named_buffers())
    except Exception:
        # Operations that need values. DDP then does both, as it does by default.
        traceback.print_exc(file=sys.stderr)
        return AfterStep()
    unused = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    changed = [name for name, was, version in before if was._version != version or after.get(name) is not was]
    return AfterStep(tuple(unused), tuple(changed))
