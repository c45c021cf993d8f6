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
    """Return a model as rank 0 of a device mesh has it in training: sharded by FSDP, with FSDP's checkpointing."""
    return shard(model, fsdp_settings(arm), ACCELERATE[arm.precision], mesh)


def why_not_sharded(workload: Workload, layers: Sequence[str], ranks: int = 2) -> str | None:
    """Return why accelerate cannot shard a workload's model by these classes of layers; ``None`` where it can.

    It cannot where modules share a weight in an unusual way, say. This joins a process group with ranks that do not
    exist, so call it in a process that ends soon.
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

    DDP need not search for unused parameters in each step where every parameter gets a gradient, and need not broadcast
    buffers from rank 0 where none changes. Returns an empty ``AfterStep()`` where a fake step fails. This changes how
    the process computes attention masks, so call it in a process that ends soon.
    """
    try:
        decide_masks_without_values(padded=workload.padding > 0)
        with fake_tensor_mode():
            model = build_fake_model(workload)
            batch = zero_batch(workload, model, 2)
            # torch counts a tensor's changes in place in ``_version``.
            before = [(name, buffer, int(buffer._version)) for name, buffer in model.named_buffers()]
            model(**batch).loss.backward()
            after: dict[str, torch.Tensor] = dict(model.named_buffers())
    except Exception:
        # Some operations need values. DDP then searches and broadcasts, as the Trainer has it do by default.
        traceback.print_exc(file=sys.stderr)
        return AfterStep()
    unused = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    changed = [name for name, old, version in before if old._version != version or after.get(name) is not old]
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
    """Records what rank 0 under ZeRO allocates in a traced step: buffers, gradients and its part of the optimizer.

    ``tracer`` records the activations of the same step. Sizes named ``…_elements`` count numbers, not bytes.
    """

    def __init__(self, model: Any, arm: Arm, tracer: StorageTracer) -> None:
        self._tracer = tracer
        self._stage = arm.zero_stage or 0
        self._offloads = arm.offloads_optimizer
        self._element_bytes = compute_dtype(arm).itemsize
        settings = deepspeed_settings(arm)["zero_optimization"]
        self._bucket_elements = int(settings["reduce_bucket_size"])
        # With ``overlap_comm`` one bucket fills while the other is exchanged.
        self._buckets_count = 2 if settings["overlap_comm"] and self._stage < 3 else 1
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        self._trained_elements = sum(trained)
        self._all_elements = sum(parameter.numel() for parameter in model.parameters())
        self._largest_elements = max(trained)
        self._part_elements = -(-self._trained_elements // arm.ranks)
        # Weights that this rank has between steps.
        self._kept_elements = -(-self._all_elements // arm.ranks) if self._stage == 3 else self._all_elements
        self._optimizer: torch.optim.Optimizer | None = None
        # Numbers of allocations that are alive: buckets, gathered weights, this rank's part of the gradients.
        self._buckets: list[int] = []
        self._gathered: list[int] = []
        self._gradients: list[int] = []
        self.is_last = True
        """Whether the current micro-step is the last of its optimizer step."""

    def _hold(self, label: str, elements: int, stream: int = 0) -> int:
        """Record an allocation of elements in the compute dtype on a stream (0: the default); return its number."""
        number = self._tracer.hold(label, elements * self._element_bytes)
        if stream:
            self._tracer.trace.streams[number] = stream
        return number

    def _let_go_all(self, numbers: list[int]) -> None:
        """Record the release of the allocations with these numbers, and empty the list."""
        for number in numbers:
            self._tracer.let_go(number)
        numbers.clear()

    def begin(self, kind: Any, options: dict[str, Any]) -> None:
        """Record what is allocated before the first step, and create an optimizer: ``kind(parameters, **options)``.

        All weights, or with ZeRO-3 this rank's part, are one allocation: DeepSpeed copies them into one flat tensor.
        An offloaded optimizer is not created; its state is on the host.
        """
        self._hold("weights", self._kept_elements)
        if self._stage == 3:
            self._hold("gradients", self._part_elements)
            self._hold("communication", self._bucket_elements)
        if self._offloads:
            self._hold("communication", self._largest_elements)
            return
        partition = torch.empty(self._part_elements, dtype=torch.float32)
        self._tracer.see(partition, "optimizer")
        self._optimizer = kind([torch.nn.Parameter(partition)], **options)

    def prepare_forward(self, model: Any) -> None:
        """Record that ZeRO-3 gathers whole weights of the model's first parameters, which stay until the update."""
        if self._stage < 3 or self._gathered:
            return
        room_elements = _GATHERED_ELEMENTS
        for parameter in model.parameters():
            elements = min(room_elements, parameter.numel())
            room_elements -= elements
            if elements:
                self._gathered.append(self._hold("weights", elements, _GATHERING))

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Record what DeepSpeed's gradient hook does: it copies a parameter's gradient into a bucket, and frees it.

        Below ZeRO-3, the first call in a micro-step allocates the buckets. Gradients that accumulate whole stay.
        """
        if not self._buckets and self._stage < 3:
            self._buckets = [self._hold("communication", self._bucket_elements) for _ in range(self._buckets_count)]
        if not self._accumulates_whole:
            parameter.grad = None

    @property
    def _accumulates_whole(self) -> bool:
        """Whether this micro-step's gradients stay whole, as ZeRO-1 reduces them in the last micro-step only."""
        return self._stage == 1 and not self.is_last

    def end_backward(self) -> None:
        """Record what follows a backward pass: this rank's gradients are accumulated, and the buckets are freed."""
        if self._accumulates_whole:
            return
        if self._stage < 3 and not self._offloads and not self._gradients:
            # Rank 0's are those of the first half of the model, which the backward pass reaches when most activations
            # are freed.
            self._gradients.append(self._hold("gradients", self._part_elements, _REDUCING))
        self._let_go_all(self._buckets)
        # Gradients that belong to several ranks are copied into a tensor of their own before they are exchanged.
        shared_elements = min(self._bucket_elements, self._trained_elements)
        self._tracer.let_go(self._hold("communication", shared_elements, _REDUCING))

    def update(self) -> None:
        """Record the optimizer's update of this rank's part of the weights, whose gradient is made float32 for it."""
        self._let_go_all(self._gathered)
        if self._optimizer is None:
            return
        (parameter,) = self._optimizer.param_groups[0]["params"]
        flat = self._hold("gradients", self._part_elements)
        parameter.grad = torch.empty_like(parameter)
        self._tracer.see(parameter.grad, "gradients")
        self._tracer.let_go(flat)
        self._let_go_all(self._gradients)
        self._tracer.phase = "optimizer"
        self._optimizer.step()
        parameter.grad = None
