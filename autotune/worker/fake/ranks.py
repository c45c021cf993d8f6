"""Find out on fake tensors what one rank of several holds, under DDP, FSDP2 or ZeRO, and what DDP can skip."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from autotune.core.candidate import Arm
from autotune.core.inspection import AfterStep
from autotune.core.workload import Workload
from autotune.space.levers import ACCELERATE, HALF
from autotune.space.training_arguments import deepspeed_settings, fsdp_settings
from autotune.worker.failures import first_line
from autotune.worker.fake.tracer import StorageTracer, materialise
from autotune.worker.private.accelerate import shard
from autotune.worker.private.torch import fake_tensor_mode, join_fake_ranks, start_sharding
from autotune.worker.private.transformers import decide_masks_without_values
from autotune.worker.trial.build import on_meta
from autotune.worker.trial.synthetic import zero_batch


def build_fake_model(workload: Workload) -> Any:
    """Return a workload's model with random weights in training mode, within a mode of fake tensors.

    It is built on the ``meta`` device first: ``Module.to``, by which peft places its adapters, cannot move parameters
    that are fake tensors already.
    """
    model = on_meta(workload, "eager" if workload.task == "seq2seq-lm" else "sdpa")
    materialise(model)
    return model


def shard_model(model: Any, arm: Arm, mesh: Any) -> Any:
    """Return the model of rank 0 after the start of training: sharded, with FSDP's own checkpointing."""
    return shard(model, fsdp_settings(arm), ACCELERATE[arm.precision], mesh)


def why_not_sharded(workload: Workload, layers: Sequence[str], ranks: int = 2) -> str | None:
    """Return why accelerate cannot shard a model by these classes of layers; ``None`` where it can.

    One example are models that share a weight between modules in an unusual way. This joins a process group with ranks
    that do not exist, so call it in a process that ends soon.
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
    """Return the parameters without a gradient after a step, and the buffers that a step changes.

    DDP waits for a gradient of every parameter, unless it searches for unused ones in each step: it can skip the search
    where none is unused. It broadcasts all buffers from rank 0 before each step: it can skip that where none changes.
    Returns an ``AfterStep()`` without these where the step cannot be traced. This changes how the process computes
    attention masks, so call it in a process that ends soon.
    """
    try:
        decide_masks_without_values(padded=workload.padding > 0)
        with fake_tensor_mode():
            model = build_fake_model(workload)
            batch = zero_batch(workload, model, 2)
            before = [(name, buffer, int(buffer._version)) for name, buffer in model.named_buffers()]
            model(**batch).loss.backward()
            after: dict[str, torch.Tensor] = dict(model.named_buffers())
    except Exception:
        # Some operations need values. DDP then searches and broadcasts, as the Trainer has it do by default.
        traceback.print_exc(file=sys.stderr)
        return AfterStep()
    unused = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    changed = [name for name, was, version in before if was._version != version or after.get(name) is not was]
    return AfterStep(tuple(unused), tuple(changed))


# What a rank under DeepSpeed's ZeRO allocates besides activations, in the order in which DeepSpeed does. Its own code
# does not run on fake tensors: it reads values and addresses. What it allocates follows from sizes alone, and is
# repeated here from ``stage_1_and_2.py`` and ``stage3.py`` in ``deepspeed/runtime/zero`` (0.19.8), for rank 0 with
# contiguous gradients. What ZeRO-3 gathers and frees for each module is estimated. Buffers that do not move the peaks
# of recorded steps are left out (docs/results/memory.md).

# CUDA streams besides the default one: gradients are exchanged in one, weights of ZeRO-3 gathered in the other.
_REDUCING, _GATHERING = 1, 2

# Parameters that ZeRO-3 keeps gathered where the backward pass begins: those that it meets again within
# stage3_max_reuse_distance, 1e9 elements by default, on the way back.
_GATHERED_ELEMENTS = 500_000_000


def compute_dtype(arm: Arm) -> torch.dtype:
    """Return the dtype to which DeepSpeed converts a model."""
    return getattr(torch, HALF.get(arm.precision, "float32"))  # type: ignore[no-any-return]


class ZeroRank:
    """Records what rank 0 under ZeRO allocates in a traced step: buffers, gradients and its part of the optimizer."""

    def __init__(self, model: Any, arm: Arm, tracer: StorageTracer) -> None:
        self._tracer = tracer
        self._stage = arm.zero_stage or 0
        self._offloads = arm.offloads_optimizer
        self._element_bytes = compute_dtype(arm).itemsize
        settings = deepspeed_settings(arm)["zero_optimization"]
        self._bucket_elements = int(settings["reduce_bucket_size"])
        self._buffers_count = 2 if settings["overlap_comm"] and self._stage < 3 else 1
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        self._trained_elements = sum(trained)
        self._all_elements = sum(parameter.numel() for parameter in model.parameters())
        self._largest_elements = max(trained)
        self._part_elements = -(-self._trained_elements // arm.ranks)
        self._kept_elements = -(-self._all_elements // arm.ranks) if self._stage == 3 else self._all_elements
        self._optimizer: torch.optim.Optimizer | None = None
        self._buffers: list[int] = []
        self._gathered: list[int] = []
        self._gradients: list[int] = []
        """This rank's part of the gradients."""
        self.is_last = True
        """Whether the micro-step is the last of its step."""

    def _hold_part(self, label: str, elements: int, stream: int = 0) -> int:
        """Record an allocation of elements in the compute dtype; return its number."""
        number = self._tracer.hold(label, elements * self._element_bytes)
        if stream:
            self._tracer.trace.streams[number] = stream
        return number

    def _let_go_all(self, held: list[int]) -> None:
        """Record the release of some allocations, and empty their list."""
        for number in held:
            self._tracer.let_go(number)
        held.clear()

    def begin(self, kind: Any, options: dict[str, Any]) -> None:
        """Record the weights and this rank's part of the optimizer; ``kind`` and ``options`` create the optimizer.

        All weights, or with ZeRO-3 this rank's part, are one allocation: DeepSpeed copies them into one flat tensor.
        """
        self._hold_part("weights", self._kept_elements)
        if self._stage == 3:
            self._hold_part("gradients", self._part_elements)
            self._hold_part("communication", self._bucket_elements)
        if self._offloads:
            self._hold_part("communication", self._largest_elements)
            return
        partition = torch.empty(self._part_elements, dtype=torch.float32)
        self._tracer.see(partition, "optimizer")
        self._optimizer = kind([torch.nn.Parameter(partition)], **options)

    def prepare_forward(self, model: Any) -> None:
        """Record the gathered weights of ZeRO-3, which stay until the update."""
        if self._stage < 3 or self._gathered:
            return
        left = _GATHERED_ELEMENTS
        for parameter in model.parameters():
            elements = min(left, parameter.numel())
            left -= elements
            if elements:
                self._gathered.append(self._hold_part("weights", elements, _GATHERING))

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Record what DeepSpeed's gradient hook does: it copies a parameter's gradient into a bucket, and frees it.

        Below ZeRO-3, the first call in a micro-step allocates the buckets. Gradients that accumulate whole stay.
        """
        if not self._buffers and self._stage < 3:
            self._buffers = [
                self._hold_part("communication", self._bucket_elements) for _ in range(self._buffers_count)
            ]
        if not self._accumulates_whole:
            parameter.grad = None

    @property
    def _accumulates_whole(self) -> bool:
        """Whether gradients stay whole until the last micro-step."""
        return self._stage == 1 and not self.is_last

    def end_backward(self) -> None:
        """Record the accumulation of this rank's gradients, and free the buckets."""
        if self._accumulates_whole:
            return
        if self._stage < 3 and not self._offloads and not self._gradients:
            # Rank 0's are those of the first half of the model, which the backward pass reaches when most activations
            # are freed.
            self._gradients.append(self._hold_part("gradients", self._part_elements, _REDUCING))
        self._let_go_all(self._buffers)
        # Gradients that belong to several ranks are copied into a tensor of their own before they are exchanged.
        self._let_go_all(
            [self._hold_part("communication", min(self._bucket_elements, self._trained_elements), _REDUCING)]
        )

    def update(self) -> None:
        """Record the update of this rank's part of the weights."""
        self._let_go_all(self._gathered)
        if self._optimizer is None:
            return
        (parameter,) = self._optimizer.param_groups[0]["params"]
        flat = [self._hold_part("gradients", self._part_elements)]
        parameter.grad = torch.empty_like(parameter)
        self._tracer.see(parameter.grad, "gradients")
        self._let_go_all(flat)
        self._let_go_all(self._gradients)
        self._tracer.phase = "optimizer"
        self._optimizer.step()
        parameter.grad = None
