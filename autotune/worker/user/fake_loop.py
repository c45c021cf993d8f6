"""Trace the memory of a step of the user's own loop, a function of a ``LoopConfig``, on fake tensors.

The function itself runs, in a process without a GPU for each arm. Once it asks for its first batch, the parameters of
all modules that there are become fake tensors, and so are the batches that it gets. What it does with them is recorded:

1. A first micro-step leaves behind what a loop holds from one pass to the next, such as its loss.
2. Two micro-steps and the optimizer's step are the traced ones; a loop that does not accumulate makes one of them.
3. Before the next forward pass, the gradients may be freed. There the trace ends, and the process with it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Callable, Generator, Iterable
from typing import Any, NoReturn

import torch

from autotune.core import loop as loop_interface
from autotune.core.candidate import OWN_OPTIM, Arm
from autotune.core.chip import Chip
from autotune.core.inspection import ModelFacts
from autotune.core.loop import LoopConfig
from autotune.core.prediction import ArmsToTrace
from autotune.space.levers import is_traced
from autotune.worker.checkpointing import outermost
from autotune.worker.fake.operations import OperationTally
from autotune.worker.fake.scaling import packed
from autotune.worker.fake.semantics import install_cuda_semantics
from autotune.worker.fake.step import tracing
from autotune.worker.fake.tracer import DEATH, StorageTracer
from autotune.worker.trial.listener import Listener
from autotune.worker.trial.training_watch import TrainingWatch
from autotune.worker.user.code import enter, load_function
from autotune.worker.user.fake_steps import (
    Memory,
    NotTraceableError,
    OwnStep,
    Traced,
    arms_of,
    batch_to_trace,
    leave_large_weights_unset,
    of_loader,
    trace_in_forks,
    update_as_on_gpu,
    why_not,
)
from autotune.worker.user.guard import Guard, forget_steps
from autotune.worker.user.inspection import Code
from autotune.worker.wrapping import around

# The first micro-step is not traced, two are.
_MICRO_STEPS = 3


def trace_loop(code: Code, model: ModelFacts, wanted: ArmsToTrace, limit_seconds: float) -> Memory:
    """Return the packed trace of a step of a loop, for each arm that may be searched. Raises nothing."""
    assert wanted.chip is not None
    searched = model.interface.searched
    arms = arms_of(
        wanted.precisions if "precision" in searched else ("fp32",),
        wanted.checkpointing if "checkpointing" in searched else (False,),
        model.attn_implementations[0],
        (OWN_OPTIM,),
    )
    traced = [arm for arm in arms if is_traced(arm)]
    accumulates = "accumulation" in searched
    traces = {arm: functools.partial(_trace, code, arm, accumulates, wanted.chip) for arm in traced}
    if not traces:
        return Memory(unknown=f"{arms[0].attn_implementation} attention has own kernels")
    return trace_in_forks(traces, limit_seconds)


def _trace(code: Code, arm: Arm, accumulates: bool, chip: Chip, send: Callable[[Traced], NoReturn]) -> NoReturn:
    """Run the function in this process, a fork, up to the end of the trace."""
    source = code.source
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
        leave_large_weights_unset()
        enter(source)
        guard = Guard(source, lambda message, _: send(Traced(why=message)))
        guard.install(code.scratch.stop_file)
        accumulation = _MICRO_STEPS if accumulates else 1
        config = LoopConfig(8, accumulation, arm.precision, arm.gradient_checkpointing)
        loop_interface.listen(_TracedLoop(config, chip, guard.lift, send, accumulates=accumulates))
        load_function(source)(config)
        raise NotTraceableError("it ended before enough of its steps were seen")
    except BaseException as error:
        send(Traced(why=why_not(error)))


class _TracedLoop(Listener):
    """Gives a loop fake batches, and records what it does with them."""

    def __init__(
        self,
        config: LoopConfig,
        chip: Chip,
        on_begin: Callable[[], None],
        send: Callable[[Traced], NoReturn],
        *,
        accumulates: bool,
    ) -> None:
        self._config = config
        self._chip = chip
        self._on_begin = on_begin
        self._send = send
        self._accumulates = accumulates
        self._stage = "before"
        """Which micro-step this is: ``before`` the traced ones, ``first``, ``second``, or ``after`` them."""
        self._has_stepped = False
        self._passes = 0
        """Backward passes of the first traced micro-step."""
        self._optimizers: dict[int, Any] = {}
        self._tracer: StorageTracer
        self._operations: OperationTally
        self._model: torch.nn.Module

    def micro_step(self) -> NoReturn:
        """Refuse a loop whose batches are not known."""
        raise NotTraceableError("it goes over no loader with autotune.steps")

    def batches(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        """Give the loop its batches."""
        shapes = of_loader(loader)
        self._on_begin()
        forget_steps(torch)
        around(torch.autocast, "__init__", _on_cpu)
        self._model = _trained_modules()
        self._optimizers = {id(each): each for each in _alive(torch.optim.Optimizer)}
        step = OwnStep(self._model, shapes)
        size = batch_to_trace(self._model, shapes)
        install_cuda_semantics(self._chip, padded=shapes.is_padded)
        self._config.set_batch(size)
        self._operations = operations = OperationTally(size)
        with tracing(self._model, self._chip, operations, padded=shapes.is_padded) as tracer:
            self._tracer = tracer
            step.exchange_plain_tensors()
            for optimizer in self._optimizers.values():
                step.over_fake_parameters(optimizer)
            watch = TrainingWatch()
            watch.listener = self
            watch.begin_timed()
            watch.install(calls=False)
            yield shapes.at(size)
            self._forget_update()
            tracer.enter("first inputs", "inputs")
            first = shapes.at(size)
            tracer.enter("second inputs", "inputs")
            second = shapes.at(size)
            tracer.enter("first micro-step", "activations")
            self._stage = "first"
            operations.counts_as = "micro_step"
            yield first
            operations.counts_as = None
            if self._accumulates:
                tracer.enter("second micro-step", "activations")
                self._stage = "second"
                yield second
                operations.counts_as = None
            if not self._has_stepped:
                raise NotTraceableError("its optimizer steps after another number of batches than it is told")
            self._stage = "after"
            gc.collect()
            ended = len(tracer.trace.events)
            more = shapes.at(size)
            begun = len(tracer.trace.events)
            self._finish = functools.partial(self._answer, size, ended, begun)
            try:
                yield more
            finally:
                # The next batch was asked for, or the loop was left.
                self._finish()

    def _answer(self, size: int, ended: int, begun: int) -> NoReturn:
        """Send the trace: up to its end, and what is freed before anything else is allocated."""
        events = self._tracer.trace.events
        freed = itertools.takewhile(lambda event: event[1] == DEATH, events[begun:])
        trace = self._tracer.so_far()
        born = {number for number, _ in events[:ended]}
        trace.events = [*events[:ended], *(event for event in freed if event[0] in born)]
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        # Of several passes only the first was counted.
        operations = self._operations.operations(trained) if self._passes <= 1 else None
        self._send(Traced(packed(trace, size, 1, operations)))

    def backward_begins(self, tensors: Any) -> None:
        """End the trace, unless the gradients were freed before."""
        if self._stage == "after":
            self._finish()

    def backward_ends(self) -> None:
        """Mark the end of a pass, and the part of the step that follows."""
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._tracer.see(parameter.grad, "gradients")
        # Clipping is not counted, as of a Trainer.
        self._operations.counts_as = None
        if self._stage == "first":
            self._passes += 1
        if self._stage == "first" and not self._accumulates:
            self._tracer.enter("second micro-step", "activations")
        if self._stage == ("second" if self._accumulates else "first"):
            # Of several backward passes the last one counts.
            self._tracer.enter("update", "workspaces")

    def optimizer_begins(self, optimizer: Any) -> None:
        """Mark the update."""
        self._optimizers[id(optimizer)] = optimizer
        update_as_on_gpu(optimizer)
        if self._accumulates and self._stage in ("before", "first"):
            raise NotTraceableError("its optimizer steps after another number of batches than it is told")
        if self._stage in ("first", "second"):
            self._has_stepped = True
            self._tracer.phase = "optimizer"
            self._operations.counts_as = "update"

    def _forget_update(self) -> None:
        """Have gradients and the optimizers' state allocated by the traced steps, as in a training that begins."""
        for parameter in self._model.parameters():
            parameter.grad = None
        for optimizer in self._optimizers.values():
            optimizer.state.clear()


def _alive(kind: type) -> list[Any]:
    """List the objects of a class, or of one derived from it, that are alive in this process."""
    # Asking the type runs no code of the object's own.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _trained_modules() -> torch.nn.Module:
    """Return one module of the outermost ones that have parameters."""
    modules: list[torch.nn.Module] = _alive(torch.nn.Module)
    trained = [each for each in outermost(modules) if any(True for _ in each.parameters())]
    if not trained:
        raise NotTraceableError("it has made no torch.nn.Module when it asks for its first batch")
    return trained[0] if len(trained) == 1 else torch.nn.ModuleList(trained)


def _on_cpu(make: Any, context: Any, device_type: str, dtype: Any = None, *words: Any, **options: Any) -> None:
    """Make an autocast for a GPU, which is not at hand, one for the CPU, where the tensors are."""
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.float16
    make(context, device_type, dtype, *words, **options)
