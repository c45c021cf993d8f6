"""Trace the memory of a step of the user's own ``Trainer`` on fake tensors, in forks of the process that built it.

A fork has everything that the user's code made: its model, data, collator and optimizer. There, parameters are
replaced by fake tensors of the same shapes, so that nothing is computed and no GPU is used. A fork must come before
the process's first backward pass, since threads of the autograd engine do not survive it.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from autotune.core.candidate import OWN_OPTIM, Arm
from autotune.core.device import Chip
from autotune.core.inspection import ModelFacts
from autotune.core.messages import InspectionWork
from autotune.core.prediction import TracedStep
from autotune.space.arms import is_traced
from autotune.space.space import usable_cores
from autotune.worker.arrays import arrays_by_place
from autotune.worker.checkpointing import disable_checkpointing, enable_checkpointing
from autotune.worker.failures import first_line
from autotune.worker.fake.memory import TRACED_BATCH, packed
from autotune.worker.fake.semantics import install_cuda_semantics
from autotune.worker.fake.step import Training, trace_training, with_autocast
from autotune.worker.private.accelerate import compute_on_cpu
from autotune.worker.private.torch import forget_optimizer_hooks
from autotune.worker.private.transformers import compute_on_cpu as compute_arguments_on_cpu
from autotune.worker.private.transformers import prepares_inputs_itself
from autotune.worker.private.trl import fold_logits_as_on_gpu
from autotune.worker.process import in_forks
from autotune.worker.user.code import UserCodeError
from autotune.worker.wrapping import around

# Tracing a large model took 3 s on an idle core; a search goes on without what takes longer than this.
_MOST_SECONDS = 60.0
# Each fork writes to about 1 GiB of memory.
_MOST_AT_ONCE = 4


# Smaller weights take no time to initialise. Larger ones are pages of their own, which the system gives out as zeros.
_LARGE_ELEMENTS = 2**20


def leave_large_weights_unset() -> None:
    """Skip the random initialization of large parameters for the rest of this process, since they become fake.

    Models with random weights are then built in no time: for 132 million parameters in 0.01 s rather than 1.5 s (one
    core of an AMD EPYC, torch 2.13, transformers 5.23).
    """

    def fill_small(fill: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_large = isinstance(tensor, torch.nn.Parameter) and tensor.numel() >= _LARGE_ELEMENTS
        return tensor if is_large else fill(tensor, *args, **kwargs)

    for name in ("normal_", "uniform_"):
        around(torch.Tensor, name, fill_small)


class TrainerStep(Training):
    """A step of a ``transformers.Trainer``, to be traced on fake tensors (shapes without values)."""

    def __init__(self, trainer: Any) -> None:
        if prepares_inputs_itself(trainer):
            raise NotTraceableError(f"{type(trainer).__name__} makes the inputs of its steps in a way of its own")
        self._trainer = trainer
        self.model = trainer.model
        self.shapes = of_loader(trainer.get_train_dataloader())
        self.max_grad_norm = float(trainer.args.max_grad_norm or 0.0)
        self.arm = Arm()
        """What is traced; set before ``begin``."""
        # The reference keeps the real parameters alive: a fork has no CUDA to free them with.
        self._real = dict(self.model.named_parameters(remove_duplicate=False))
        unknown_type = next((type(p).__name__ for p in self._real.values() if type(p) is not torch.nn.Parameter), None)
        if unknown_type is not None:
            raise NotTraceableError(f"its model has weights of type {unknown_type}")

    def begin(self, batch_size: int) -> torch.optim.Optimizer:
        """Set the arm's precision and checkpointing; return the optimizer over the fake parameters.

        It is the one that the ``Trainer`` was given, or the one that it makes for the arm.
        """
        for module in self.model.modules():
            # Tensors that are neither parameters nor buffers may be on a GPU, which a fork cannot use.
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor):
                    vars(module)[name] = torch.empty(value.shape, dtype=value.dtype)
        self.model.train()
        if hasattr(getattr(self.model, "config", None), "use_cache"):
            self.model.config.use_cache = False
        change = enable_checkpointing if self.arm.gradient_checkpointing else disable_checkpointing
        change(self.model)
        self.model.forward = with_autocast(self.model.forward, self.arm.precision)
        trainer, arguments = self._trainer, self._trainer.args
        compute_arguments_on_cpu(arguments)
        if trainer.optimizer is not None:
            return self._over_fake_parameters(trainer.optimizer)
        # An enumeration in some versions, else text.
        kind = type(arguments.optim)
        arguments.optim = kind(self.arm.optim) if issubclass(kind, enum.Enum) else self.arm.optim
        return trainer.create_optimizer()  # type: ignore[no-any-return]

    def batch(self, size: int) -> Any:
        """Return one batch of ``size`` samples."""
        return self.shapes.at(size)

    def loss(self, batch: Any) -> Any:
        """Return the loss as the Trainer computes it."""
        return self._trainer.compute_loss(self.model, dict(batch))

    def _over_fake_parameters(self, optimizer: Any) -> torch.optim.Optimizer:
        """Replace the parameters of an optimizer by the fake ones, clear its state, and return it.

        Where it would update all parameters at once by default on a GPU, it does so here: its temporary results are
        then as large as the parameters together (``_default_to_fused_or_foreach`` in torch/optim/optimizer.py).
        """
        fakes = dict(self.model.named_parameters(remove_duplicate=False))
        fake_of = {id(real): fakes[name] for name, real in self._real.items()}
        for group in optimizer.param_groups:
            group["params"] = [
                fake_of[id(each)]
                if id(each) in fake_of
                # One that belongs to no module of the model.
                else torch.nn.Parameter(torch.empty(each.shape, dtype=each.dtype), each.requires_grad)
                for each in group["params"]
            ]
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        optimizer.state.clear()
        return optimizer  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Memory:
    """The traced steps of the user's ``Trainer``, and why any are missing."""

    steps: tuple[TracedStep, ...] = ()
    unknown: str | None = None
    """Why an arm was not traced; ``None`` where all were."""


def with_memory(model: ModelFacts, memory: Memory) -> ModelFacts:
    """Return the facts of a model with its traced steps, and the reason for missing traces in its interface."""
    interface = dataclasses.replace(model.interface, memory_unknown=memory.unknown)
    return dataclasses.replace(model, memory=memory.steps, interface=interface)


def traced(work: InspectionWork, model: ModelFacts, trainer: Any) -> Memory:
    """Trace the memory of a step for each arm (configuration without its batch) to search, in forks.

    fp16 takes as much memory as bf16, tf32 as much as fp32: only one of each is traced. Never raises.
    """
    wanted = work.arms
    assert model.own is not None
    assert wanted is not None
    assert wanted.chip is not None
    own = model.own.arm
    optims = wanted.optims if wanted.optims and own.optim != OWN_OPTIM else (own.optim,)
    precisions = dict.fromkeys("bf16" if name in ("bf16", "fp16") else "fp32" for name in wanted.precisions)
    arms = [
        Arm(precision, checkpoints, own.attn_implementation, optim)  # type: ignore[arg-type]
        for optim in optims
        for precision in precisions
        for checkpoints in wanted.checkpointing
    ]
    to_trace = [arm for arm in arms if is_traced(arm)]
    if not to_trace:
        return Memory(unknown=f"{arms[0].attn_implementation} attention or {arms[0].optim} has own kernels")
    try:
        step = TrainerStep(trainer)
    except Exception as error:
        return Memory(unknown=why_not(error))
    traces = [functools.partial(_trace, step, arm, wanted.chip) for arm in to_trace]
    at_once = max(1, min(usable_cores(), _MOST_AT_ONCE))
    answers = in_forks(Memory, traces, at_once=at_once, limit_seconds=_MOST_SECONDS)
    found = [answer or Memory(unknown="its process ended") for answer in answers]
    steps = tuple(step for answer in found for step in answer.steps)
    reasons = [answer.unknown for answer in found if answer.unknown is not None]
    return Memory(steps, reasons[0] if reasons else None)


def _trace(step: TrainerStep, arm: Arm, chip: Chip, send: Callable[[Memory], NoReturn]) -> NoReturn:
    """Trace the memory of the step with an arm in this forked process, and end it with the result."""
    try:
        torch.set_num_threads(1)
        # Remove the wrappers of backward passes and optimizer steps: these judge a real training.
        torch.autograd.backward = inspect.unwrap(torch.autograd.backward)
        forget_optimizer_hooks()
        compute_on_cpu()
        fold_logits_as_on_gpu()
        install_cuda_semantics(chip, padded=step.shapes.is_padded)
        step.arm = arm
        around(torch.Tensor, "__iter__", _refuse_sample_loops)
        trace, operations = trace_training(step, TRACED_BATCH, chip, padded=step.shapes.is_padded)
        answer = Memory((TracedStep(arm, packed(trace, TRACED_BATCH, operations)),))
    except BaseException as error:
        answer = Memory(unknown=why_not(error))
    send(answer)


def _refuse_sample_loops(iterate: Callable[[torch.Tensor], Any], values: torch.Tensor) -> Any:
    """Raise ``NotTraceableError`` for a loop over the samples of a batch; iterate over other tensors.

    A trace does not show how often it runs at another batch. Some losses of TRL have such a loop without a GPU.
    """
    if values.numel() and values.ndim and len(values) % TRACED_BATCH == 0:
        raise NotTraceableError("its step goes over the samples of a batch one by one")
    return iterate(values)


def why_not(error: BaseException) -> str:
    """Return why a step was not traced; print the traceback of an unexpected error."""
    if isinstance(error, NotTraceableError | UserCodeError):
        return str(error)
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return f"what its step computes depends on values of tensors ({error.func})"
    # For readers of the log.
    traceback.print_exception(error)
    return first_line(error)


# Number of samples read to find the largest one: about what a trial trains on.
_MOST_SAMPLES = 512
_MOST_STREAMED = 64
_MOST_LOOKING_SECONDS = 2.0
# Samples in the batch that shows whether batches are padded.
_MIXED = 8


class NotTraceableError(Exception):
    """The training is one that cannot be traced on fake tensors; the message says why."""


class BatchShapes:
    """The shapes of a batch of the largest sample that was seen, for any number of samples."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        samples = list(_samples(dataset))
        if not samples:
            raise NotTraceableError("its training data has no samples")
        largest = max(samples, key=_size)
        self._two, self._three = (collate([copy.deepcopy(largest) for _ in range(count)]) for count in (2, 3))
        # With samples of other sizes, a collator that pads shows it.
        mixed = [copy.deepcopy(sample) for sample in samples[:: max(1, len(samples) // _MIXED)]]
        arrays = arrays_by_place(collate([*mixed, copy.deepcopy(largest)]))
        self.is_padded = any("attention_mask" in place and bool((mask == 0).any()) for place, mask in arrays)
        """Whether attention masks have zeros."""

    def at(self, size: int) -> Any:
        """Return a batch of ``size`` samples with values of zero."""
        return _scaled(self._two, self._three, size)


def of_loader(loader: Any) -> BatchShapes:
    """Return the shapes of a ``DataLoader``'s batches. Raises ``NotTraceableError`` where its data make the batches."""
    collate, dataset = getattr(loader, "collate_fn", None), getattr(loader, "dataset", None)
    if collate is None or dataset is None or getattr(loader, "batch_sampler", loader) is None:
        raise NotTraceableError("its batches are not made by a DataLoader from samples")
    return BatchShapes(collate, dataset)


def _samples(dataset: Any) -> Iterator[Any]:
    """Yield samples spread over the data, for a short time; of a stream the first ones."""
    deadline = time.monotonic() + _MOST_LOOKING_SECONDS
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        step = max(1, len(dataset) // _MOST_SAMPLES)
        found: Iterator[Any] = (dataset[number] for number in range(0, len(dataset), step))
    else:
        found = itertools.islice(iter(dataset), _MOST_STREAMED)
    for sample in found:
        yield sample
        if time.monotonic() > deadline:
            return


def _size(value: Any) -> int:
    """Return a rough size of a sample, by which the largest one is found: its elements, letters or pixels."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value)) if value and not isinstance(value[0], int | float) else len(value)
    if isinstance(value, str):
        return len(value)
    # Images of PIL have their width and height there, arrays of numpy the number of their elements.
    size = getattr(value, "size", 1)
    if isinstance(size, tuple) and len(size) == 2:
        return int(size[0] * size[1])
    return size if isinstance(size, int) else 1


def _scaled(two: Any, three: Any, size: int) -> Any:
    """Return a batch of ``size`` samples, or a part of it, extrapolated from those of two and three samples."""
    if isinstance(two, torch.Tensor):
        shape = [_scaled(a, b, size) for a, b in zip(two.shape, three.shape, strict=True)]
        return torch.zeros(shape, dtype=two.dtype)
    if isinstance(two, Mapping):
        return {name: _scaled(value, three[name], size) for name, value in two.items()}
    if isinstance(two, list | tuple):
        if len(two) != len(three):
            raise NotTraceableError("its batches are lists with an entry for each sample")
        return type(two)(_scaled(a, b, size) for a, b in zip(two, three, strict=True))
    if isinstance(two, int) and not isinstance(two, bool):
        return two + (three - two) * (size - 2)
    return two
