"""Run the micro-steps of a ``Trainer`` as CUDA graphs: the same kernels, launched by one call.

A micro-step is a forward and a backward pass. It is captured once for each shape of its inputs, and replayed from then
on. The host then launches one graph in place of thousands of kernels, so that a step that waited for the host does not
wait any more. No compiler is needed, and the kernels and their order stay the same.

The graphs share one memory pool, which is as large as the largest of them if that is captured first. So where a larger
shape comes, all graphs are dropped, and captured anew after that shape's. Once there are graphs, eager micro-steps take
their memory from that pool too: between two replays nothing in it is in use but losses and gradients. Gradients are
always in the same tensors, since a graph reads and writes fixed addresses. The first graph of a pool writes them; all
others add to them, after they were set to zero where an optimizer step begins. ``torch.cuda.make_graphed_callables``
cannot be used: it hands out gradient buffers of its own, and the next replay overwrites what was accumulated in them
(github.com/pytorch/pytorch/issues/181723).

All micro-steps run on one stream of their own, eager ones too. Autograd adds to a parameter's gradient on the stream
on which it first met the parameter. Were that another stream than the one that is captured, the capture would fail.

Each graph is compared with an eager micro-step on the same samples, with the same random numbers, before it is used:
its loss, and its gradients.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from transformers import Trainer
from transformers.utils import import_utils

from autotune.training.batches import SettingUnavailableError

# Kernels are chosen, compiled and loaded in the first micro-steps of a shape, which a capture would not survive.
# torch.cuda.make_graphed_callables runs three before it captures; with less than two, Triton kernels are not loaded.
EAGER_MICRO_STEPS = 3
# Most shapes of inputs that get graphs; further shapes run without. Each graph takes some time, and memory of the
# driver. Batches padded to multiples of 64 have 8 shapes at 512 tokens, and 16 at 1,024. A choice.
MOST_SHAPES = 32
# Largest relative difference of a loss, and of the norms of all gradients, between a graph and an eager pass. Gradients
# of embeddings are summed by atomic additions, in any order; a graph that reads wrong memory is off by more. A choice.
_TOLERANCE = 1e-2
# Memory of a loss: the smallest block of torch's allocator.
_LOSS_BYTES = 512


@dataclass(frozen=True)
class _Graph:
    """A captured micro-step, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[torch.Tensor]
    loss: torch.Tensor


_Result = tuple[torch.Tensor, torch.Tensor]
"""The loss of a micro-step, and the norm of the gradient of each parameter."""


@dataclass
class _Shape:
    """One shape of inputs: its elements, its eager micro-steps, its graphs that write gradients or add to them."""

    elements: int
    eager_runs: int = 0
    writing: _Graph | None = None
    adding: _Graph | None = None

    def graph(self, *, is_first: bool) -> _Graph | None:
        """Return the graph for the first micro-step of an optimizer step or a later one; ``None`` without any."""
        return self.writing if is_first and self.writing is not None else self.adding


class GraphedSteps:
    """Runs micro-steps in place of ``Trainer.training_step``: as CUDA graphs where possible, else eagerly.

    ``is_first`` tells the first micro-step of an optimizer step. ``leaves`` are the inputs without their structure.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._eager: Callable[..., torch.Tensor] = trainer.training_step
        self._shapes: dict[Hashable, _Shape] = {}
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._gradients: Sequence[torch.Tensor] = ()
        """The gradients' tensors, once a graph writes them; in the order of ``_parameters``."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._keeps_memory = False
        """Whether an eager micro-step left something in the memory of the graphs, so that none runs there any more."""
        self._must_release = False
        """Whether a replay would overwrite what was left there, so that the graphs have to be captured anew."""
        self.replays = 0
        """Micro-steps that ran as a graph."""
        self.on_replay: Callable[[], None] | None = None
        """Called before each replay of an earlier capture: a micro-step without the Python code of the model."""
        self.on_capture: Callable[[], None] | None = None
        """Called before each micro-step that is captured, which takes several times as long as another."""

    def __call__(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run a micro-step and return its loss, as ``Trainer.training_step`` does."""
        run = self._run_eagerly
        if not self._parameters:
            self._parameters = [p for p in model.parameters() if p.requires_grad]
            run = self._run_first
        inputs = self._trainer._prepare_inputs(inputs)
        leaves, structure = pytree.tree_flatten((inputs, num_items_in_batch))
        shape = self._shape_of(leaves, structure)
        # An optimizer step begins without gradients.
        is_first = self._parameters[0].grad is None
        if self._must_release and is_first:
            self._must_release = not self.release()
        graph = None
        if shape is not None and not self._must_release:
            graph = shape.graph(is_first=is_first)
            if graph is None:
                if shape.eager_runs >= EAGER_MICRO_STEPS and self._may_capture(shape, is_first=is_first):
                    return self._captured(model, shape, leaves, structure, is_first=is_first)
                shape.eager_runs += 1
        if graph is None:
            if is_first and self._gradients:
                # Autograd then adds to the tensors that graphs write.
                self._zero()
            return run(model, inputs, num_items_in_batch)
        if self.on_replay is not None:
            self.on_replay()
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return self._replay(model, graph, tensors, is_first=is_first)

    def _run_first(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Run the first micro-step; from now on, have checkpoints not save the state of random numbers.

        A capture fails where a checkpoint reads or sets this state. Raises ``SettingUnavailableError`` where a model
        with checkpoints draws random numbers, since it could not draw the same ones again.
        """
        recomputing = [
            module
            for module in model.modules()
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func")
        ]
        for module in recomputing:
            own: Any = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = functools.partial(own, preserve_rng_state=False)  # type: ignore[assignment]
        before = torch.cuda.get_rng_state(self._trainer.args.device)
        loss = self._run_eagerly(model, inputs, num_items_in_batch)
        if recomputing and not torch.equal(before, torch.cuda.get_rng_state(self._trainer.args.device)):
            raise SettingUnavailableError(
                f"{type(_original(model)).__name__} draws random numbers, as dropout does, and its checkpoints cannot "
                "draw the same again in a CUDA graph; train without dropout, or without cuda_graphs"
            )
        return loss

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run the block on the stream of the micro-steps, ordered after earlier work and before later work."""
        usual = torch.cuda.current_stream(self._trainer.args.device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            yield
        usual.wait_stream(self._stream)

    def _run_eagerly(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Run a micro-step without a graph; in the graphs' memory, unless an earlier one left something there."""
        if not self._gradients or self._keeps_memory:
            with self._on_stream():
                return self._run(model, inputs, num_items_in_batch)
        before = torch.cuda.memory_allocated()
        with self._on_stream():
            with self._in_pool_of_graphs():
                loss = self._run(model, inputs, num_items_in_batch)
            loss = loss.clone()
        # More than the copy of the loss is left: a replay would overwrite what is still used.
        if torch.cuda.memory_allocated() - before > _LOSS_BYTES:
            self._keeps_memory = self._must_release = True
        return loss

    @contextlib.contextmanager
    def _in_pool_of_graphs(self) -> Iterator[None]:
        """Allocate the block's memory from the pool of the graphs, in all threads.

        ``torch.cuda.use_mem_pool`` does this for one thread only, but the backward pass runs in another.
        """
        device = self._trainer.args.device.index
        torch._C._cuda_beginAllocateToPool(device, self._pool)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(device, self._pool)
            # The beginning counted a use of the pool.
            torch._C._cuda_releasePool(device, self._pool)

    def _run(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Run a micro-step without a graph, on inputs that the ``Trainer`` has already prepared.

        transformers makes a mask of ones explicit while a stream is captured. It does so here, too: otherwise layers
        would be compiled again in the capture, which fails there, and takes as long again.
        """
        own = vars(self._trainer).get("_prepare_inputs")
        self._trainer._prepare_inputs = lambda prepared: prepared
        asks, import_utils.is_cuda_stream_capturing = import_utils.is_cuda_stream_capturing, lambda: True
        try:
            return self._eager(model, inputs, num_items_in_batch)
        finally:
            import_utils.is_cuda_stream_capturing = asks
            del self._trainer._prepare_inputs
            if own is not None:
                self._trainer._prepare_inputs = own

    def _shape_of(self, leaves: list[Any], structure: Any) -> _Shape | None:
        """Return the record of the inputs' shape; ``None`` where no graph supports it, or there are too many shapes."""
        key = self._key(leaves, structure)
        if key is None or (key not in self._shapes and len(self._shapes) >= MOST_SHAPES):
            return None
        elements = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        return self._shapes.setdefault(key, _Shape(elements))

    def _may_capture(self, shape: _Shape, *, is_first: bool) -> bool:
        """Return whether this shape can be captured now. A larger one first drops the graphs of smaller shapes.

        A graph that adds to gradients can only be captured while these are in the tensors that graphs write.
        """
        captured = [each.elements for each in self._shapes.values() if each.writing or each.adding]
        if captured and shape.elements > max(captured):
            return is_first and self.release()
        return is_first or (bool(self._gradients) and self._parameters[0].grad is self._gradients[0])

    def _captured(
        self, model: torch.nn.Module, shape: _Shape, leaves: list[Any], structure: Any, *, is_first: bool
    ) -> torch.Tensor:
        """Capture a micro-step, compare it with an eager one, add its gradients, and return its loss."""
        # The graph reads its inputs from these tensors, into which later inputs are copied.
        static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        held = pytree.tree_unflatten(static, structure)
        before: list[torch.Tensor] = []
        if self.on_capture is not None:
            self.on_capture()
        try:
            if self._gradients and not is_first:
                # Of earlier micro-steps of this optimizer step, which the trials below overwrite.
                before = [gradient.clone() for gradient in self._gradients]
            self._forget_gradients()
            expected = self._run_reference(model, *held)
            captured = torch.cuda.CUDAGraph()
            # torch.cuda.graph first frees what is cached for eager steps: the memory of a graph is a pool of its own.
            with torch.cuda.graph(captured, pool=self._pool, stream=self._stream):
                loss = self._run(model, *held)
        except RuntimeError as error:
            cause = _original_error(error)
            if isinstance(cause, torch.OutOfMemoryError | SettingUnavailableError):
                raise
            why = f"{type(cause).__name__}: {cause}".splitlines()[0]
            raise SettingUnavailableError(
                f"a micro-step of {type(_original(model)).__name__} cannot be captured as a CUDA graph: {why}"
            ) from error
        tensors = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
        graph = _Graph(captured, tensors, loss)
        if self._gradients:
            shape.adding = graph
        else:
            shape.writing, self._gradients = graph, self._created_gradients(model)
        loss = self._replay(model, graph, tensors, is_first=True)
        self._compare(model, expected, (loss, self._gradient_norms()))
        if before:
            torch._foreach_add_(list(self._gradients), before)
        return loss

    def release(self) -> bool:
        """Free the memory of the graphs, which are captured again on demand; return whether it was freed.

        Within an optimizer step nothing is freed, since its gradients are in that memory.
        """
        shapes = self._shapes.values()
        if not any(shape.writing for shape in shapes) or any(p.grad is not None for p in self._parameters):
            return False
        for shape in shapes:
            shape.writing = shape.adding = None
        self._gradients = ()
        # A pool ends with the last of its graphs.
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()
        return True

    def _key(self, leaves: list[Any], structure: Any) -> Hashable:
        """Return a key: shapes of tensors, values of other inputs, accumulation. ``None``: no graph supports them."""
        described: list[Hashable] = [structure, getattr(self._trainer, "current_gradient_accumulation_steps", None)]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf.device != self._trainer.args.device:
                    return None
                described.append((leaf.shape, leaf.dtype, leaf.stride()))
            elif leaf is None or isinstance(leaf, bool | int | float | str):
                described.append(leaf)
            else:
                return None
        return tuple(described)

    def _run_reference(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any) -> _Result:
        """Run an eager micro-step; return its loss and gradient norms, and discard its gradients.

        Runs on the tensors that the graph reads, so that code for them is compiled before the capture. Restores buffers
        and the GPU's random state. Raises ``SettingUnavailableError`` where the model draws random numbers on the host.
        """
        device = self._trainer.args.device
        buffers = [buffer.clone() for buffer in model.buffers()]
        on_device, on_host = torch.cuda.get_rng_state(device), _random_state(device)
        loss = self._run_eagerly(model, inputs, num_items_in_batch)
        norms = self._gradient_norms()
        self._forget_gradients()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        torch.cuda.set_rng_state(on_device, device)
        if _random_state(device) != on_host:
            raise SettingUnavailableError(
                f"{type(_original(model)).__name__} draws random numbers on the host, as layers that are left out at "
                "random do (layerdrop), and a graph would always run what was drawn first"
            )
        return loss, norms

    def _gradient_norms(self) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])

    def _compare(self, model: torch.nn.Module, eager: _Result, graph: _Result) -> None:
        """Raise ``SettingUnavailableError`` where a graph's result differs from an eager micro-step's."""
        for what, expected, found in zip(("loss", "gradients"), eager, graph, strict=True):
            difference = float((found - expected).float().norm() / expected.float().norm().clamp_min(1e-12))
            # ``not <=``, so that a graph's NaN is a difference. An eager loss or norm of inf or NaN proves nothing.
            if not difference <= _TOLERANCE and bool(expected.isfinite().all()):
                raise SettingUnavailableError(
                    f"the {what} of {type(_original(model)).__name__} in a CUDA graph differ from those of an eager "
                    f"step by {difference:.1%}; train without cuda_graphs"
                )

    def _created_gradients(self, model: torch.nn.Module) -> Sequence[torch.Tensor]:
        """Return the gradients that the first capture created. Raises ``SettingUnavailableError`` if one is missing."""
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise SettingUnavailableError(f"{unused[0]} gets no gradient; freeze it, or train without CUDA graphs")
        return [p.grad for p in self._parameters if p.grad is not None]

    def _replay(
        self, model: torch.nn.Module, graph: _Graph, tensors: Sequence[torch.Tensor], *, is_first: bool
    ) -> torch.Tensor:
        """Copy inputs to a graph, replay it, and return its loss."""
        if not model.training:
            # After an evaluation. Graphs run the kernels of training in any mode, but other code may read the mode,
            # and a schedule-free optimizer has other weights for evaluations.
            model.train()
            if callable(train := getattr(self._trainer.optimizer, "train", None)):
                train()
        if is_first and any(shape.adding is graph for shape in self._shapes.values()):
            # The optimizer step begins with a graph that adds to gradients.
            self._zero()
        torch._foreach_copy_(list(graph.inputs), list(tensors), non_blocking=True)
        graph.graph.replay()
        if is_first:
            self._attach()
        self.replays += 1
        return graph.loss.clone()

    def _forget_gradients(self) -> None:
        """Clear the gradients: set the graphs' tensors to zero, or without graphs, each gradient to ``None``."""
        if self._gradients:
            self._zero()
            return
        for parameter in self._parameters:
            parameter.grad = None

    def _zero(self) -> None:
        """Set the graphs' gradient tensors to zero and assign them to the parameters."""
        torch._foreach_zero_(list(self._gradients))
        self._attach()

    def _attach(self) -> None:
        """Assign the graphs' gradient tensors to the parameters again, after ``zero_grad`` removed them."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient


def _random_state(device: torch.device) -> tuple[Any, ...]:
    """Return the state of the host's random number generators, which a captured model must not use."""
    names, keys, *numbers = np.random.get_state()
    of_torch = () if device.type == "cpu" else tuple(torch.get_rng_state().tolist())
    return random.getstate(), names, tuple(keys), *numbers, of_torch


def _original_error(error: RuntimeError) -> RuntimeError:
    """Return the earliest ``RuntimeError`` of a chain: ending a failed capture raises another error."""
    earliest, link = error, error.__cause__ or error.__context__
    while link is not None:
        earliest = link if isinstance(link, RuntimeError) else earliest
        link = link.__cause__ or link.__context__
    return earliest


def _original(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model within ``torch.compile``'s wrapper, or the model itself."""
    return getattr(model, "_orig_mod", model)


def retry_evaluation_without_graphs(trainer: Trainer, steps: GraphedSteps) -> None:
    """Make an evaluation that runs out of memory run again after the graphs' memory is freed.

    Eager steps leave their memory to an evaluation, but graphs keep theirs: with whisper-small under 24 GiB, 22.1 GiB
    of it was unavailable (H200, torch 2.11.0, 24 November 2026). With ``batch_eval_metrics`` memory is freed before
    each evaluation, since metrics must not see a batch twice.
    """
    evaluate = trainer.evaluation_loop

    @functools.wraps(evaluate)
    def evaluates(*args: Any, **kwargs: Any) -> Any:
        if trainer.args.batch_eval_metrics:
            steps.release()
            return evaluate(*args, **kwargs)
        rng_state = torch.get_rng_state()
        try:
            return evaluate(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not steps.release():
                raise
        # A loader draws a seed each time that it begins; the second evaluation draws the same one.
        torch.set_rng_state(rng_state)
        return evaluate(*args, **kwargs)

    trainer.evaluation_loop = evaluates


def check_code(trainer: Trainer) -> None:
    """Raise ``SettingUnavailableError`` where the user's own code runs in a micro-step, which a graph would skip."""
    for method in ("training_step", "compute_loss"):
        if getattr(type(trainer), method) is not getattr(Trainer, method) or method in vars(trainer):
            raise SettingUnavailableError(
                f"{type(trainer).__name__}.{method} is your own; its Python code would run once instead of each step"
            )
    if trainer.compute_loss_func is not None:
        raise SettingUnavailableError(
            "the Trainer has a compute_loss_func, whose Python code would run once instead of each step"
        )


def use_cuda_graphs(trainer: Trainer) -> GraphedSteps:
    """Make a ``Trainer`` run its micro-steps as CUDA graphs.

    Raises ``SettingUnavailableError`` where the training is known not to allow this. The user's own Python code in a
    micro-step, such as a ``compute_loss``, would run only during the capture, so it is refused.
    """
    args = trainer.args
    if args.device.type != "cuda":
        raise SettingUnavailableError(f"CUDA graphs need a CUDA device; the training is on {args.device}")
    if args.world_size > 1:
        raise SettingUnavailableError("CUDA graphs are for one rank: the exchange of gradients is not captured")
    check_code(trainer)
    if args.torch_compile_mode in ("reduce-overhead", "max-autotune"):
        raise SettingUnavailableError(f"torch_compile_mode={args.torch_compile_mode} makes CUDA graphs of its own")
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise SettingUnavailableError("reentrant checkpointing is not captured in CUDA graphs; set use_reentrant=False")
    steps = GraphedSteps(trainer)
    trainer.training_step = steps
    retry_evaluation_without_graphs(trainer, steps)
    return steps
