"""Trace an optimizer step of the ``Trainer`` on fake tensors, and predict from it the peak memory at many batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers.modeling_utils
from transformers import TrainingArguments

from autotune.core.candidate import Arm
from autotune.core.ceiling import PREDICTION_MARGIN, Bounds
from autotune.core.device import Chip
from autotune.core.prediction import MemoryPrediction, Operations, PredictionAnswer, PredictionWork, spare_bytes
from autotune.core.workload import Workload
from autotune.space.features import optim_package
from autotune.space.levers import HALF
from autotune.training import loss, sparse
from autotune.worker.checkpointing import enable_checkpointing
from autotune.worker.fake.memory import TRACED_BATCH, OutOfCapError, ScalableStep, replay, unpacked
from autotune.worker.fake.operations import OperationTally
from autotune.worker.fake.ranks import ZeroRank, compute_dtype, shard_model
from autotune.worker.fake.semantics import FewBitsOptimizer, install_cuda_semantics, quantize_fake
from autotune.worker.fake.tracer import DEATH, Events, StorageTracer, Trace, fake_of, materialise
from autotune.worker.private.accelerate import with_float32_outputs
from autotune.worker.private.torch import fake_tensor_mode, join_fake_ranks
from autotune.worker.private.transformers import optimizer_class
from autotune.worker.trial.build import build_model
from autotune.worker.trial.synthetic import MASKED_FRACTION, zero_batch

# Workspace of cuBLASLt, which linear layers with a bias use: recorded on an H200 (torch 2.11).
_LT_WORKSPACE_BYTES = 1024**2


class _KeptOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Stands in for torch's ``save_on_cpu``: a saved tensor is dropped, and a new one is made in the backward pass."""

    def __init__(self, **_: Any) -> None:
        super().__init__(lambda saved: (saved.shape, saved.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1]))


def _enable_checkpointing(model: Any, arm: Arm) -> None:
    """Turn on checkpointing as the arm sets it, with activations on the host if it offloads them."""
    if arm.offload_activations:
        transformers.modeling_utils.save_on_cpu = _KeptOnHost
    enable_checkpointing(model, **({"offload": True} if arm.offload_activations else {}))


def _optimizer_kind(name: str, model: torch.nn.Module) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer class that ``TrainingArguments.optim`` names, and its default settings for a model."""
    return optimizer_class(TrainingArguments(optim=name, use_cpu=True, report_to="none", output_dir="unused"), model)


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the model's trained parameters, as ``TrainingArguments.optim`` names it."""
    if optim_package(name) == "bitsandbytes":
        return FewBitsOptimizer(model, name)
    kind, options = _optimizer_kind(name, model)
    return kind([p for p in model.parameters() if p.requires_grad], **options)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _on_gradients(model: Any, act: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Have ``act`` called within the block, with each trained parameter as soon as its gradient has accumulated."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(act) for parameter in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _label_gradients(model: Any, tracer: StorageTracer) -> None:
    """Give the allocations that hold gradients of a model's parameters the label ``gradients``."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            tracer.see(parameter.grad, "gradients")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable automatic garbage collection in the block, so that two traces free memory in the same order."""
    was_enabled = gc.isenabled()
    # Collections by a call then skip what exists already, which would take a tenth of the time of a trace.
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _noting_pieces(tracer: StorageTracer) -> Iterator[None]:
    """Have a fused loss compute all logits in one piece, and mark its allocations, for ``Size.logits`` to divide."""
    pieces_of, add = loss.pieces_of, loss.Sums.add

    def add_noted(sums: loss.Sums, piece: Any, start: int, hidden: torch.Tensor, *others: Any) -> None:
        tracer.piecewise_logits = len(hidden) * len(sums.weight)
        try:
            add(sums, piece, start, hidden, *others)
        finally:
            tracer.piecewise_logits = 0

    loss.pieces_of, loss.Sums.add = lambda *_: 1, add_noted  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        loss.pieces_of, loss.Sums.add = pieces_of, add  # type: ignore[method-assign]


@contextlib.contextmanager
def tracing(
    model: torch.nn.Module, chip: Chip, operations: OperationTally | None, *, padded: bool
) -> Iterator[StorageTracer]:
    """Make the model's parameters fake tensors, record all allocations within the block, and yield the recorder.

    ``operations`` counts operations, if given; ``padded`` says whether the samples have padding.
    """
    tracer = StorageTracer((chip.workspace_bytes, _LT_WORKSPACE_BYTES), operations, is_padded=padded)
    with fake_tensor_mode(), _no_garbage_collection(), _noting_pieces(tracer), tracer:

        def weight(tensor: torch.Tensor) -> torch.Tensor:
            fake = fake_of(tensor)
            tracer.see(fake, "weights")
            return fake

        materialise(model, weight)
        yield tracer


class Training(Protocol):
    """A training to trace: a model on any device, with methods that make its batches, its loss and its optimizer."""

    model: Any
    max_grad_norm: float
    """Gradients are clipped to this norm; with 0 they are not clipped."""

    def begin(self, batch_size: int) -> torch.optim.Optimizer:
        """Prepare the training after the model's parameters became fake tensors; return the optimizer."""

    def batch(self, size: int) -> Any:
        """Return one batch of ``size`` samples on the device."""

    def loss(self, batch: Any) -> Any:
        """Return the loss of a batch, without keeping other outputs of the forward pass alive."""


def trace_training(
    training: Training, batch_size: int, chip: Chip, *, padded: bool, buckets_bytes: int = 0
) -> tuple[Trace, Operations]:
    """Trace one optimizer step of two micro-steps on fake tensors; return its allocations and operations.

    ``padded`` says whether the samples have padding. ``buckets_bytes`` is the total size of DDP's gradient buckets.
    """
    operations = OperationTally(batch_size)
    with tracing(training.model, chip, operations, padded=padded) as tracer:
        if buckets_bytes:
            tracer.hold("communication", buckets_bytes)
        optimizer = training.begin(batch_size)
        for is_second, batch in _micro_steps(tracer, lambda: training.batch(batch_size)):
            if not is_second:
                operations.counts_as = "micro_step"
                with _on_gradients(training.model, tracer.note_gradient):
                    _micro_step(training.loss, batch)
                _label_gradients(training.model, tracer)
                operations.counts_as = None
            elif not tracer.repeat_micro_step("first micro-step"):
                # The second one cannot be copied from the first, so it is run as well.
                _micro_step(training.loss, batch)
        _update(training.model, optimizer, tracer, training.max_grad_norm)
        trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
        counted = operations.operations(trained)
        gc.collect()
        # The events are copied before the optimizer and its state go out of scope, which would add their release.
        return tracer.so_far(), counted


def _micro_steps(tracer: StorageTracer, load: Callable[[], Any], count: int = 2) -> Iterator[tuple[bool, Any]]:
    """Load the batches of ``count`` micro-steps, one or two; for each yield whether it is the last, and its batch.

    As the Trainer does, it loads all batches first. The tracer is told of every part of the step that begins, also of
    those of a micro-step that is left out, since readers of the trace look for each.
    """
    batches = []
    for number, part in enumerate(("first inputs", "second inputs")):
        tracer.enter(part, "inputs")
        if number < count:
            batches.append(load())
    for number, part in enumerate(("first micro-step", "second micro-step")):
        tracer.enter(part, "activations")
        if number < count:
            yield number + 1 == count, batches[number]


def _update(model: Any, optimizer: torch.optim.Optimizer, tracer: StorageTracer, max_grad_norm: float) -> None:
    """Clip the gradients, step the optimizer and drop the gradients, as the update of the traced step."""
    tracer.enter("update", "workspaces")
    if max_grad_norm > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    tracer.phase = "optimizer"
    if tracer.operations is not None:
        # The operations of clipping are not counted: a GPU takes all gradients at once, here they come one by one.
        tracer.operations.counts_as = "update"
    optimizer.step()
    if tracer.operations is not None:
        tracer.operations.counts_as = None
    optimizer.zero_grad(set_to_none=True)


def _micro_step(loss_of: Callable[[Any], Any], batch: Any) -> None:
    """Run the forward and backward pass of a batch, with the loss divided by an accumulation of 2."""
    (loss_of(batch) / 2).backward()


def with_autocast(forward: Any, precision: str, *, caches: bool = True) -> Any:
    """Wrap a model's ``forward`` in autocast of a precision (``bf16``, say), as Trainer and accelerate do.

    ``caches``: whether autocast keeps its 16-bit copies of weights until the end of the forward pass.
    """
    if precision not in HALF:
        return forward
    autocast = torch.autocast("cpu", getattr(torch, HALF[precision]), cache_enabled=caches)
    return with_float32_outputs(autocast(forward))


@dataclass
class _BuiltIn:
    """The built-in training of a workload, with synthetic batches, in one arm (a configuration without its batch)."""

    workload: Workload
    arm: Arm
    model: Any
    max_grad_norm: float = 1.0

    def begin(self, batch_size: int) -> torch.optim.Optimizer:
        """Turn on what the arm says: fused loss, sparse prediction, checkpointing; return the optimizer."""
        if self.arm.fused_loss:
            loss.fuse_loss_of(self.model)
        if self.arm.sparse_prediction:
            sparse.predict_chosen_tokens(self.model)
        if self.arm.gradient_checkpointing:
            _enable_checkpointing(self.model, self.arm)
        return _optimizer(self.arm.optim, self.model)

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """Return a synthetic batch, with the positions of the tokens to predict if only these are computed."""
        batch = zero_batch(self.workload, self.model, size)
        if self.arm.sparse_prediction:
            masked = math.ceil(MASKED_FRACTION * self.workload.seq_len)
            computed = size * sparse.positions_to_compute(self.workload.seq_len, masked)
            batch[sparse.POSITIONS] = torch.zeros(computed, dtype=torch.int64)
        return batch

    def loss(self, batch: dict[str, torch.Tensor]) -> Any:
        """Return the loss as ``Trainer.compute_loss`` does: the other outputs are freed on return."""
        forward = with_autocast(self.model.forward, self.arm.precision, caches=not self.arm.uncached_casts)
        return forward(**batch)["loss"]


class FakeTraining:
    """Traces steps of one arm (a configuration without its batch) as on a chip. Patches torch permanently."""

    def __init__(self, workload: Workload, arm: Arm, chip: Chip) -> None:
        self._workload = workload
        self._arm = arm
        self._chip = chip
        self.operations: Operations | None = None
        """Arithmetic and memory traffic of the step that was traced last; ``None`` before ``trace``."""
        # A mesh reads values, so it is made before tensors are fake.
        self._mesh = join_fake_ranks(arm.ranks, arm.dp_shard_size) if arm.is_sharded else None
        install_cuda_semantics(chip, padded=workload.padding > 0)

    def step(self) -> ScalableStep:
        """Return the allocations of a step as a function of the batch, traced at ``TRACED_BATCH``.

        Under FSDP and ZeRO a step of one micro-step is traced as well, as it differs from the first of two.
        """
        if not self._arm.is_sharded and self._arm.zero_stage is None:
            return ScalableStep(self.trace(TRACED_BATCH), TRACED_BATCH)
        trace = self._sharded_trace if self._arm.is_sharded else self._zero_trace
        alone = ScalableStep(trace(self._model(), TRACED_BATCH, micro_steps=1), TRACED_BATCH)
        return ScalableStep(trace(self._model(), TRACED_BATCH, micro_steps=2), TRACED_BATCH, alone)

    def _model(self) -> Any:
        """Return the workload's model on ``meta``, with quantized layers if the workload asks for them."""
        model = build_model(self._workload, self._arm.attn_implementation, torch.device("meta"))
        if self._workload.quantize is not None:
            quantize_fake(model, self._workload)
        model.config.use_cache = False
        return model

    def trace(self, batch_size: int) -> Trace:
        """Return the allocations of one optimizer step of two micro-steps, on one device or one rank of DDP."""
        model = self._model()
        # DDP keeps buckets beside the gradients: ``gradient_as_bucket_view`` is off, and no field of TrainingArguments.
        buckets = sum(p.nbytes for p in model.parameters() if p.requires_grad) if self._arm.strategy == "ddp" else 0
        trace, self.operations = trace_training(
            _BuiltIn(self._workload, self._arm, model),
            batch_size,
            self._chip,
            padded=self._workload.padding > 0,
            buckets_bytes=buckets,
        )
        return trace

    def _sharded_trace(self, model: Any, batch_size: int, *, micro_steps: int) -> Trace:
        """Return the allocations of a step of one or two micro-steps on one rank of FSDP."""
        with tracing(model, self._chip, None, padded=self._workload.padding > 0) as tracer:
            tracer.follow_resizes()
            tracer.phase = "weights"
            model = shard_model(model, self._arm, self._mesh)
            # Whole weights are freed when nothing refers to them. A trial never has whole weights: it shards on meta.
            gc.collect()
            tracer.forget_freed()
            if self._arm.fused_loss:
                loss.fuse_loss_of(model)
            optimizer = _optimizer(self._arm.optim, model)
            batch_of = functools.partial(zero_batch, self._workload, model, batch_size)
            for is_last, batch in _micro_steps(tracer, batch_of, micro_steps):
                model.set_requires_gradient_sync(is_last or self._arm.sync_each_batch)
                # FSDP casts instead of autocast, by hooks that only a call of the model runs, not its ``forward``.
                _micro_step(lambda given: model(**given)["loss"], batch)
            _label_gradients(model, tracer)
            _update(model, optimizer, tracer, 1.0)
            gc.collect()
            # Returned before the optimizer and its state go out of scope.
            return tracer.so_far()

    def _zero_trace(self, model: Any, batch_size: int, *, micro_steps: int) -> Trace:
        """Return the allocations of a step of one or two micro-steps on one rank of DeepSpeed."""
        workspaces = self._chip.workspace_bytes, _LT_WORKSPACE_BYTES
        tracer = StorageTracer(workspaces, None, is_padded=self._workload.padding > 0)
        dtype = compute_dtype(self._arm)
        # Records weights, gradients and optimizer state, so that only activations are traced.
        rank = ZeroRank(model, self._arm, tracer)
        with fake_tensor_mode(), _no_garbage_collection():
            materialise(model, lambda tensor: tracer.overlook(fake_of(tensor, dtype)))
            with tracer:
                if self._arm.gradient_checkpointing:
                    _enable_checkpointing(model, self._arm)
                rank.begin(*_optimizer_kind(self._arm.optim, model))

                def load() -> dict[str, torch.Tensor]:
                    batch = zero_batch(self._workload, model, batch_size)
                    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}

                with _on_gradients(model, rank.take_gradient):
                    for rank.is_last, batch in _micro_steps(tracer, load, micro_steps):
                        rank.prepare_forward(model)
                        _micro_step(lambda given: model(**given)["loss"], batch)
                        rank.end_backward()
                model.zero_grad()
                tracer.enter("update", "workspaces")
                rank.update()
                gc.collect()
                # Returned before the optimizer and its state go out of scope.
                return tracer.so_far()


# Largest batch of a free search (autotune.space.space.LARGEST_FREE_BATCH).
_LARGEST_BATCH = 65536
_NICENESS = 19


def predict(work: PredictionWork, workload: Workload) -> PredictionAnswer:
    """Predict the peak memory at each requested batch, and with ``work.multiple`` the largest batch that fits.

    ``work`` has the packed trace of a step, or a step is traced here. Lowers the priority of this process.
    """
    # On one core at the lowest priority, since trials are timed at the same time.
    torch.set_num_threads(1)
    os.nice(_NICENESS)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # A collection takes a tenth of a second or more in a process with torch, and this one ends soon.
    gc.disable()
    operations: Operations | None
    if work.step is not None:
        step, operations = unpacked(work.step)
    else:
        # Random weights take the same memory, and need not be read.
        training = FakeTraining(dataclasses.replace(workload.at_its_worst(), weights=None), work.arm, work.chip)
        step, operations = training.step(), training.operations
    limits = Limits(step, work.chip, Bounds(work.cap_bytes, work.line_bytes), spare_bytes(work.arm, operations))
    wanted, largest = {*work.batches}, None
    if work.multiple:
        largest = limits.largest_batch(work.multiple)
        # Predict also the next batch, which does not fit.
        wanted |= {(batch, 1) for batch in (largest, largest + work.multiple) if batch}
    predicted = tuple(limits.prediction(batch, accumulation) for batch, accumulation in sorted(wanted))
    return PredictionAnswer(predicted, largest, operations)


@dataclass(frozen=True)
class Limits:
    """Predicts which batches of a step fit: within the cap, torch's limit on reserved memory, and below the line.

    The line is the amount that the user allows; ``PREDICTION_MARGIN`` below it is left free.
    """

    step: ScalableStep
    chip: Chip
    bounds: Bounds
    spare_bytes: int = 0
    """What DDP may take besides the predicted memory."""

    def prediction(self, batch: int, accumulation: int) -> MemoryPrediction:
        """Return the peaks at a batch and accumulation, whether they fit, and the bytes of each kind at the peak."""
        step = self.step.step_for(accumulation)
        events = step.at(batch, self.chip, accumulation=accumulation)
        allocated, reserved, runs_out = self._peaks(events, step)
        return MemoryPrediction(
            batch,
            accumulation,
            micro_batch_bytes=self.step.micro_batch_bytes(batch, self.chip),
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            runs_out=runs_out,
            fits=self._peaks_fit(reserved, runs_out=runs_out),
            anatomy=anatomy(events, step.label),
        )

    def _peaks_fit(self, reserved_bytes: int, *, runs_out: bool) -> bool:
        """Return whether a step fits that has this peak of reserved memory, or runs out of memory."""
        return not runs_out and self.bounds.fits(reserved_bytes + self.spare_bytes, PREDICTION_MARGIN)

    def _peaks(self, events: Events, step: ScalableStep) -> tuple[int, int, bool]:
        """Return the peaks of allocated and reserved bytes of a step, and whether it runs out of memory.

        Where reserved memory without a cap would exceed the cap, the reserved peak is that with the cap, under which
        the allocator frees cached segments. If even this is not enough, the step runs out.
        """
        uncapped = replay(events, stream_of=step.stream_of)
        if uncapped.peak_reserved_bytes <= self.bounds.cap_bytes:
            return uncapped.peak_allocated_bytes, uncapped.peak_reserved_bytes, False
        try:
            capped = replay(events, self.bounds.cap_bytes, step.stream_of)
        except OutOfCapError:
            return uncapped.peak_allocated_bytes, uncapped.peak_reserved_bytes, True
        return uncapped.peak_allocated_bytes, capped.peak_reserved_bytes, False

    def _fits(self, batch: int) -> bool:
        """Return whether a step without accumulation fits at this batch."""
        step = self.step.step_for(1)
        events = step.at(batch, self.chip, accumulation=1)
        # The peak of allocated bytes, unrounded, is a lower bound of reserved memory, and faster to compute.
        if _peak(events)[0] > self.bounds.line_bytes:
            return False
        _, reserved, runs_out = self._peaks(events, step)
        return self._peaks_fit(reserved, runs_out=runs_out)

    def largest_batch(self, multiple: int) -> int:
        """Return the largest batch that fits without accumulation and is a multiple of ``multiple``; 0 if none fits."""
        # Double until a batch does not fit, then bisect: ``low`` fits, ``high`` does not.
        low, high = 0, multiple
        while high <= _LARGEST_BATCH and self._fits(high):
            low, high = high, high * 2
        while high - low > multiple:
            middle = (low + high) // 2 // multiple * multiple
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low


def _peak(events: Events) -> tuple[int, int]:
    """Return the peak of allocated bytes, unrounded, and the number of events up to the peak."""
    allocated = peak = events_to_peak = 0
    size_of: dict[int, int] = {}
    for count, (number, size) in enumerate(events, start=1):
        if size == DEATH:
            allocated -= size_of.pop(number)
        else:
            size_of[number] = size
            allocated += size
            if allocated > peak:
                peak, events_to_peak = allocated, count
    return peak, events_to_peak


def anatomy(events: Events, label: Callable[[int], str]) -> dict[str, int]:
    """Return the bytes of each kind of allocation at the peak of allocated bytes; ``label`` returns the kind."""
    parts: dict[str, int] = {}
    at_peak: dict[int, int] = {}
    for number, size in events[: _peak(events)[1]]:
        if size == DEATH:
            at_peak.pop(number)
        else:
            at_peak[number] = size
    for number, size in at_peak.items():
        parts[label(number)] = parts.get(label(number), 0) + size
    return parts
