"""Find out on fake tensors what one rank of several holds, under DDP, FSDP2 or ZeRO, and what DDP can skip."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from autotune.core.candidate import Arm
from autotune.core.inspection import AfterStep
from autotune.core.workload import Workload
from autotune.space.precision_names import ACCELERATE, HALF
from autotune.space.training_arguments import deepspeed_settings, fsdp_settings
from autotune.worker.failures import first_line
from autotune.worker.fake.tracer import StorageTracer, materialise
from autotune.worker.private.accelerate import shard
from autotune.worker.private.torch import fake_tensor_mode, join_fake_ranks, start_sharding
from autotune.worker.private.transformers import decide_masks_without_values
from autotune.worker.trial.build import build_model
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


def build_fake_model(workload: Workload) -> Any:
    """Return the model of a workload in random weights, as in training; call it under a mode of fake tensors.

    It is built on the ``meta`` device first: ``Module.to``, by which peft places its adapters, cannot move parameters
    that are fake tensors already.
    """
    attention = "eager" if workload.task == "seq2seq-lm" else "sdpa"
    model = build_model(dataclasses.replace(workload, weights=None), attention, torch.device("meta"))
    materialise(model)
    return model


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


# What a rank under DeepSpeed's ZeRO allocates besides activations, in the order in which DeepSpeed does. Its own code
# does not run on fake tensors: it reads values and addresses. What it allocates follows from sizes alone, and is
# repeated here from ``stage_1_and_2.py`` and ``stage3.py`` in ``deepspeed/runtime/zero`` (0.19.8), for rank 0 with
# contiguous gradients. What ZeRO-3 gathers and frees for each module is estimated.

_FLOAT_BYTES = 4
_NORM_BYTES = 8
"""Norms of gradients are computed in float64."""

# CUDA streams besides the default one: gradients are exchanged in one, weights of ZeRO-3 gathered in the other.
_REDUCING, _GATHERING = 1, 2

# Parameters that ZeRO-3 keeps gathered where the backward pass begins: those that it meets again within
# stage3_max_reuse_distance, 1e9 elements by default, on the way back.
_GATHERED_ELEMENTS = 500_000_000


def compute_dtype(arm: Arm) -> torch.dtype:
    """Return the dtype that DeepSpeed converts a model to."""
    return getattr(torch, HALF.get(arm.precision, "float32"))  # type: ignore[no-any-return]


class _Group:
    """The parameters that one group of the optimizer has: with weight decay, or without."""

    def __init__(self, parameters: Sequence[torch.Tensor], ranks: int) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        total = sum(sizes)
        # Aligned to 4 bytes on each rank.
        self.elements = -(-total // (2 * ranks)) * 2 * ranks
        self.partition = self.elements // ranks
        self.own: dict[int, int] = {}
        """Elements of each parameter in the part of rank 0, by the parameter's id."""
        self.is_split: set[int] = set()
        """Parameters of which two ranks have a part."""
        offset = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            if offset < self.partition:
                self.own[id(parameter)] = size
            if offset // self.partition != (offset + size - 1) // self.partition:
                self.is_split.add(id(parameter))
            offset += size


class ZeroRank:
    """The buffers, partitions and gradients of rank 0 in a traced step."""

    def __init__(self, model: Any, arm: Arm, tracer: StorageTracer, batch: int) -> None:
        """``batch`` is the batch of the trace: no size recorded here is a multiple of it, which would scale with it."""
        self._tracer = tracer
        self._batch = batch
        self._stage = arm.zero_stage or 0
        self._offloads = arm.offloads_optimizer
        self._element_bytes = compute_dtype(arm).itemsize
        settings = deepspeed_settings(arm)["zero_optimization"]
        self._bucket_elements = int(settings["reduce_bucket_size"])
        self._buffers_count = 2 if settings["overlap_comm"] and self._stage < 3 else 1
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kinds = ([p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1])
        self._groups = [_Group(kind, arm.ranks) for kind in kinds if kind]
        self._ranks = arm.ranks
        self._elements = sum(parameter.numel() for parameter in model.parameters())
        self._largest = max(parameter.numel() for parameter in trained)
        self._own = {key for group in self._groups for key in group.own}
        self._split = {key for group in self._groups for key in group.is_split}
        self._own_sizes = [size for group in self._groups for size in group.own.values()]
        self._partitions: list[torch.Tensor] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._buffers: list[int] = []
        self._cast: list[int] = []
        self._gathered: list[int] = []
        self._in_partition: int | None = None
        self._accumulated: int | None = None
        self._filled = 0
        self._waiting: list[torch.Tensor] = []
        self.is_last = True
        """Whether the micro-step is the last of its step."""

    def _hold(self, label: str, elements: int, element_bytes: int | None = None, stream: int = 0) -> int:
        size_bytes = elements * (element_bytes or self._element_bytes)
        number = self._tracer.hold(label, size_bytes + 2 if size_bytes % self._batch == 0 else size_bytes)
        if stream:
            self._tracer.trace.streams[number] = stream
        return number

    def _borrow(self, elements: int, element_bytes: int | None = None, stream: int = 0) -> None:
        self._tracer.let_go(self._hold("communication", elements, element_bytes, stream))

    # Before the first step

    def cast_model(self, fake: Callable[[torch.Tensor], torch.Tensor], model: Any, dtype: torch.dtype) -> None:
        """Convert the model's weights; ``fake`` makes a tensor that is not recorded.

        They are recorded as a whole: DeepSpeed copies them into one flat tensor for each group of the optimizer.
        """
        made: dict[int, Any] = {}
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    kind = dtype if tensor.dtype.is_floating_point else tensor.dtype
                    new = fake(torch.empty(tensor.shape, dtype=kind))
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                place = module._parameters if name in module._parameters else module._buffers
                place[name] = made[id(tensor)]
        # Known by their new ids.
        self._own = {id(made[key]) for key in self._own}
        self._split = {id(made[key]) for key in self._split}
        ranks = self._ranks if self._stage == 3 else 1
        # Parameters of their own, until they are parts of the flat tensors.
        self._cast = [self._hold("weights", p.numel() // ranks) for p in model.parameters()]

    def begin(self, kind: Any, options: dict[str, Any]) -> None:
        """Split weights and optimizer state; ``kind`` and ``options`` make the optimizer."""
        trained = sum(group.elements for group in self._groups)
        if self._stage == 3:
            self._hold("weights", trained // self._ranks)
            self._hold("gradients", trained // self._ranks)
            self._hold("communication", self._bucket_elements)
            frozen = self._elements - trained
            if frozen > 0:
                self._hold("weights", frozen // self._ranks)
        else:
            self._hold("weights", self._elements)
        for number in self._cast:
            self._tracer.let_go(number)
        if self._offloads:
            self._hold("communication", self._largest)
        for group in self._groups:
            self._borrow(group.partition)
            if self._offloads:
                continue
            elements = group.partition
            partition = torch.empty(elements + (elements % self._batch == 0), dtype=torch.float32)
            self._tracer.see(partition, "optimizer")
            self._borrow(elements, _FLOAT_BYTES)
            self._partitions.append(partition)
            self._optimizers.append(kind([torch.nn.Parameter(partition)], **options))

    def prepare_forward(self, model: Any) -> None:
        """Gather the weights of ZeRO-3, which stay until the update."""
        if self._stage < 3 or self._gathered:
            return
        left = _GATHERED_ELEMENTS
        for parameter in model.parameters():
            elements = min(left, parameter.numel())
            left -= elements
            if elements:
                self._gathered.append(self._hold("weights", elements, stream=_GATHERING))

    # In the backward pass

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Do what DeepSpeed's hook does when a parameter has its gradient."""
        if not self._buffers and self._stage < 3:
            self._buffers = [self._hold("communication", self._bucket_elements) for _ in range(self._buffers_count)]
        if self._stage == 1 and not self.is_last:
            # Gradients are accumulated whole.
            return
        if self._filled + parameter.numel() > self._bucket_elements:
            self._reduce()
        self._filled += parameter.numel()
        self._waiting.append(parameter)
        if parameter.numel() <= self._bucket_elements:
            # It was copied into the bucket.
            parameter.grad = None

    def _reduce(self) -> None:
        """Exchange what is in the bucket, and keep this rank's part of it."""
        if not self._waiting:
            return
        keys = {id(parameter) for parameter in self._waiting}
        is_of_several = bool(keys & self._split) or (bool(keys & self._own) and bool(keys - self._own))
        if self._stage == 3 or (is_of_several and self._ranks > 1):
            # Parts of several ranks are copied into one tensor.
            self._borrow(self._filled, stream=_REDUCING)
        if self._stage < 3 and not self._offloads and keys & self._own and self._in_partition is None:
            self._in_partition = self._hold("gradients", sum(self._own_sizes), stream=_REDUCING)
        if self._offloads and self.is_last:
            for parameter in self._waiting:
                self._borrow(parameter.numel(), _NORM_BYTES, _REDUCING)
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting, self._filled = [], 0

    def end_backward(self) -> None:
        """Do what DeepSpeed does after a backward pass."""
        if self._stage == 1 and not self.is_last:
            return
        self._reduce()
        if self._in_partition is not None:
            if self._accumulated is None:
                self._accumulated = self._in_partition
            else:
                self._tracer.let_go(self._in_partition)
            self._in_partition = None
        for number in self._buffers:
            self._tracer.let_go(number)
        self._buffers = []

    # The update

    def update(self) -> None:
        """Update the weights, one group of the optimizer after the other."""
        for number in self._gathered:
            self._tracer.let_go(number)
        self._gathered = []
        if self._offloads:
            return
        self._borrow(max(self._own_sizes) // (self._ranks if self._stage == 3 else 1), _NORM_BYTES)
        groups = zip(self._groups, self._partitions, self._optimizers, strict=True)
        for group, partition, optimizer in groups:
            flat = self._hold("gradients", group.partition) if self._element_bytes < _FLOAT_BYTES else None
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad = torch.empty_like(partition)
            self._tracer.see(parameter.grad, "gradients")
            if flat is not None:
                self._tracer.let_go(flat)
            if group is self._groups[-1] and self._accumulated is not None:
                self._tracer.let_go(self._accumulated)
                self._accumulated = None
            self._tracer.phase = "optimizer"
            optimizer.step()
            parameter.grad = None
