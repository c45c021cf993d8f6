"""Count what a process trains by hooks in torch: calls of models, backward passes, updates.

``TrainingWatch`` counts outermost calls of modules to whose results a gradient came back, with the shapes that went in;
backward passes; updates that a gradient scaler skipped. A ``Listener`` is told of each event as it comes.

Only the outermost call of a module has a hook, which is off within that call: the modules in it run as they do without
any hook, and a compiler that traces them finds none. Gradients are looked at in steps that are not timed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.modules import module as modules

from autotune.worker.arrays import arrays_by_place, is_row, parts_by_place
from autotune.worker.failures import is_out_of_memory
from autotune.worker.private.torch import dtype_name, is_in_autograd, local_part, on_checkpoint, packs_saved_tensors
from autotune.worker.wrapping import around, lines_above, users_line

ShapesByPlace = dict[str, tuple[int, ...]]
"""The shapes of the tensors that a model is called with, then lengths of rows, by where they stand: ``1.input_ids``;
then the shapes of those that it returns: ``out.logits``."""


class Listener:
    """Receives the events of a training as they happen; each method does nothing unless it is overridden."""

    def call_begins(self, *, trains: bool) -> None:
        """Handle a call of an outermost module with parameters; ``trains`` if it computes gradients."""

    def call_ends(self, called: Any, shapes: ShapesByPlace, *, trains: bool) -> None:
        """Handle the end of a call of an outermost module, with the shapes of inputs and outputs."""

    def backward_begins(self, tensors: Any) -> None:
        """Handle the start of a backward pass from these tensors."""

    def backward_ends(self) -> None:
        """Handle the end of a backward pass."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """Handle the start of an optimizer's step."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """Handle the end of an optimizer's step."""


class StepListener:
    """Receives the events of a training's steps; each method does nothing unless it is overridden."""

    def begin(self) -> None:
        """Prepare for the first batch."""

    def step_begins(self) -> None:
        """Handle the arrival of a step's first batch."""

    def micro_step_ends(self) -> None:
        """Handle the end of a micro-step that is not the last of its step."""

    def step_ends(self, marks: tuple[Any, Any], wait_seconds: float | None = None) -> None:
        """Handle the end of a whole step; ``marks`` are from before and after its optimizer step.

        ``wait_seconds`` is the time spent waiting for batches after the first; ``None`` where all came before it.
        """

    def step_is_dropped(self) -> None:
        """Handle the end of a step that does not count."""

    def mark(self) -> Any:
        """Mark this point on the device's timeline."""


# Most tensors of a model's output that are hooked, and of its input whose shapes are recorded. A choice.
_MOST_TENSORS = 16
# Arguments with which the samples of a batch come as one row (transformers' DataCollatorWithFlattening).
_OF_PACKED_ROWS = frozenset(("position_ids", "cu_seq_lens_q", "cu_seqlens", "seq_idx"))
# Number of calls whose saved tensors are looked at. The first may be of a model that is not trained. A choice.
_LOOKED_WITHIN = 4

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of tensors; the length of a list of tensors comes before the shapes of its tensors."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an outermost module with parameters, to whose result a gradient came back."""

    module_id: int
    shapes: Shapes
    """Shapes of the tensors that went in."""
    is_packed: bool
    """Whether the samples came as one row, as its arguments show."""
    real: torch.Tensor | int | None
    """The mask of the real tokens that went in, or their number; ``None`` where it was not called with tokens."""

    @property
    def rows(self) -> int:
        """Largest possible number of samples in the call: the largest first dimension."""
        return max((shape[0] for shape in self.shapes if shape), default=0)


@dataclass(slots=True)
class StepCounts:
    """The counts of one step: the events that a ``TrainingWatch`` saw since its last ``take``."""

    calls: list[Call] = field(default_factory=list)
    backward_passes: int = 0
    """Backward passes that ended."""
    skipped_steps: int = 0
    """Updates that fused optimizers skipped, since a gradient scaler had found infinite gradients."""
    memory_errors: int = 0
    """Calls and backward passes that ran out of memory, even where the error was caught."""
    tokens: int | None = None
    """Tokens of ``calls``, without padding; ``None`` where no call's tokens are known."""
    calls_without_gradients: int = 0
    """Calls of outermost modules with parameters that compute no gradients, as of a teacher or a validation."""


class TrainingWatch:
    """Counts what is trained in this process, from ``install`` on, and tells ``listener`` of it."""

    def __init__(self) -> None:
        self.listener = Listener()
        """It is told of each event; by default it does nothing."""
        self.autocasts: set[tuple[str, str]] = set()
        """Device and dtype of each autocast in which gradients were computed: ``("cuda", "bfloat16")``."""
        self.called_in: set[tuple[str, str]] = set()
        """The part of ``autocasts`` in which a model was called."""
        self.checkpoints = False
        """Whether activations are recomputed in the backward pass; recorded from ``watch_checkpoints`` on."""
        self.weight_dtypes: set[str] = set()
        """Dtype of the first parameter of each module that was called with gradients enabled."""
        self.inner_dtypes: set[str] = set()
        """Dtypes of tensors that the first calls saved for the backward pass, without parameters and buffers."""
        self.place: str | None = None
        """The line of the user's code that called the first module: ``train.py:12``."""
        self.model: Any = None
        """The first module with parameters that was called."""
        self.trained: set[str] | None = None
        """Names of the model's parameters that had a gradient in an update before the timed steps. ``None`` where no
        update was looked at, and where an optimizer updates other tensors than the model's own."""
        self.has_gradients = False
        """Whether a parameter of any optimizer had a gradient in the updates before the timed steps."""
        self.compiles = False
        """Whether ``torch.compile`` was called."""
        self.is_removed = False
        self._looks_closely = True
        """Whether gradients and dtypes are recorded, too, which takes time: until the timed steps."""
        self._saved_tensors_hooks: Any = None
        self._calls_looked_within = 0
        self._hook: Any = None
        self._after_hook: Any = None
        self._latest_call: Call | None = None
        self._weight_dtypes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """The dtype of the first parameter of each module that was called and has any."""
        self._undo: list[Callable[[], None]] = []
        self._has_optimizer = self._has_gone_backward = False
        self._stepped_within: Any = None
        """The last optimizer that stepped within the backward pass which is running."""
        self._found_inf: list[Any] = []
        """For each update of a fused optimizer in this step, a tensor that is not 0 where the update was skipped."""
        self._counts = StepCounts()

    def install(self, *, calls: bool = True) -> None:
        """Watch backward passes and updates from now on, and with ``calls`` also module calls and saved tensors."""
        # The warning is about hooks that fire within a compiled module, where this one is off.
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        if calls:
            self._enable_hook()
            self._wrap_compile()
        self._wrap_backward()
        self._wrap_autocast()
        # torch.optim deletes its attribute of this name, so the module is taken from sys.modules.
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        before = optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_update(optimizer))
        after = optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: self._end_update(optimizer))
        self._undo += [before.remove, after.remove]

    def remove(self) -> None:
        """Stop watching, and restore the replaced functions."""
        self.is_removed = True
        self._disable_hook()
        for undo in self._undo:
            undo()
        self._undo.clear()

    def watch_checkpoints(self) -> None:
        """Record from now on whether ``torch.utils.checkpoint`` is used where gradients are computed."""

        def take() -> None:
            self.checkpoints = self.checkpoints or torch.is_grad_enabled()

        on_checkpoint(take)

    def watch_updates_by_hand(self) -> None:
        """Treat ``model.zero_grad()`` after backward passes as the end of an update, until an optimizer steps.

        For loops that subtract gradients themselves, such as PyTorch's example of a word language model.
        """
        stand_in: Any = None

        def watched(zero_grad: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal stand_in
            if not self._has_optimizer and self._has_gone_backward:
                if stand_in is None:  # An object for listeners in the place of an optimizer.
                    stand_in = SimpleNamespace(param_groups=[{"params": list(model.parameters())}])
                self.listener.optimizer_begins(stand_in)
                self._end_update(stand_in)
            return zero_grad(model, *args, **kwargs)

        self._replace(torch.nn.Module, "zero_grad", watched)

    def _replace(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        """Replace a function by ``act``, and remember to restore it."""
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        around(owner, name, act)

    def begin(self) -> None:
        """Forget the counts, the model, its place and the autocasts around calls from before the training."""
        self.drop()
        self.model = self.place = None
        self.called_in.clear()

    def take(self) -> StepCounts:
        """Return the counts since the last ``take``; waits for the device where masks or a scaler are read."""
        counts = self._counts
        counts.skipped_steps = sum(bool(found.item()) for found in self._found_inf)
        known = [call.real for call in counts.calls if call.real is not None]
        tokens = [int(torch.count_nonzero(real)) if isinstance(real, torch.Tensor) else real for real in known]
        counts.tokens = sum(tokens) if tokens else None
        self.drop()
        return counts

    def drop(self) -> int:
        """Forget the counts since the last step, without waiting for the device; return the number of memory errors."""
        errors = self._counts.memory_errors
        self._counts = StepCounts()
        self._found_inf.clear()
        # A call that was left in an unusual way may have left the hook off.
        self._enable_hook()
        return errors

    def begin_timed(self) -> None:
        """Stop looking at gradients and inside backward passes."""
        self._looks_closely = False

    # Calls of modules

    def _enable_hook(self) -> None:
        if self._hook is None and not self.is_removed:
            self._hook = modules.register_module_forward_pre_hook(self._before_call)

    def _disable_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_call(self, called: Any, _: Any) -> None:
        """Prepare to record a call of an outermost module: turn this hook off within it, and note how it is called."""
        # The sizes of tensors that are traced are tensors, and nothing is trained there.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        if self._weight_dtype(called) is None and not hasattr(called, "_orig_mod"):
            return
        self._disable_hook()
        if self.model is None:
            # A module compiled by torch.compile has no class and config of its own.
            self.model = getattr(called, "_orig_mod", called)
        if self._looks_closely:
            self.place = self.place or users_line(lines_above())
        if torch.is_grad_enabled() and not is_in_autograd():
            devices = (device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device))
            casts = [cast for device in devices if (cast := _autocast_record(device, torch.get_autocast_dtype(device)))]
            # Also an autocast that is on for good, which is never entered.
            self.autocasts.update(casts)
            self.called_in.update(casts)
        self._after_hook = called.register_forward_hook(self._after_call, with_kwargs=True, always_call=True)
        may_look = self._looks_closely and self._calls_looked_within < _LOOKED_WITHIN and torch.is_grad_enabled()
        # Hooks of checkpointing around the call would not be called for its tensors.
        if may_look and not packs_saved_tensors():
            self._look_within(called)
        if not is_in_autograd():
            self.listener.call_begins(trains=torch.is_grad_enabled())

    def restart_dtype_record(self) -> None:
        """Record again which tensors the next calls save, replacing the earlier record."""
        self._calls_looked_within = 0
        self.inner_dtypes.clear()

    def _look_within(self, called: torch.nn.Module) -> None:
        """Record the dtypes of tensors that this call saves for the backward pass, parameters and buffers excepted."""
        own = {_storage_address(each) for each in (*called.parameters(), *called.buffers())}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and _storage_address(tensor) not in own:
                self.inner_dtypes.add(dtype_name(tensor.dtype))
            # An output that its own graph saves, not detached, would never be freed without a backward pass.
            return tensor if tensor.is_leaf else tensor.detach()

        # A call of a module without tensors of its own shows nothing.
        self._calls_looked_within += bool(own)
        self._saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        self._saved_tensors_hooks.__enter__()

    def _after_call(self, called: Any, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        """Record the end of a call of an outermost module, and watch for the next such call."""
        self._after_hook.remove()
        if self._saved_tensors_hooks is not None:
            self._saved_tensors_hooks.__exit__()
            self._saved_tensors_hooks = None
        self._enable_hook()
        self._report_call(called, given, named, result)
        # Where the call failed there is no result, and torch calls this hook while it handles the error.
        if result is None and (error := sys.exc_info()[1]) is not None:
            self._note_error(error)
        else:
            self._record_call(called, given, named, result)

    def _weight_dtype(self, called: Any) -> str | None:
        """Return the dtype of a module's first parameter; ``None`` for a module without parameters."""
        if called not in self._weight_dtypes:
            first = next(called.parameters(), None)
            # A module without parameters may make some in its first call, so nothing is kept.
            if first is None:
                return None
            self._weight_dtypes[called] = dtype_name(first.dtype)
        return self._weight_dtypes[called]

    def _report_call(self, called: Any, given: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        """Report a call and the shapes of its inputs and outputs to the listener."""
        # Shapes are collected only for a listener to calls.
        if type(self.listener).call_ends is not Listener.call_ends and not is_in_autograd():
            passed = dict(parts_by_place((*given, named)))
            shapes = {place: tuple(map(int, each.shape)) for place, each in passed.items() if not is_row(each)}
            # A detector gets its samples in a list.
            shapes |= {place: (len(each),) for place, each in passed.items() if place and is_row(each)}
            # Graphs and other samples of many sizes are put into one tensor; the output has a row for each sample.
            shapes |= {place: tuple(map(int, each.shape)) for place, each in arrays_by_place(result, "out", depth=3)}
            self.listener.call_ends(called, shapes, trains=torch.is_grad_enabled())

    def _record_call(self, called: Any, given: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        """Record a call that computes gradients, once a gradient comes back to it."""
        if not torch.is_grad_enabled():
            self._counts.calls_without_gradients += not is_in_autograd()
            return
        if (weights := self._weight_dtype(called)) is None:
            return
        self.weight_dtypes.add(weights)
        tensors = (each for _, each in arrays_by_place(result, depth=3) if isinstance(each, torch.Tensor))
        first = itertools.islice(tensors, _MOST_TENSORS)
        outputs = [each for each in first if each.requires_grad and not each.is_leaf]
        shapes = tuple(shapes_in((*given, *named.values())))
        real = _real_tokens(called, given, named)
        waiting = [Call(id(called), shapes, not _OF_PACKED_ROWS.isdisjoint(named), real)]

        def arrive(_: Any) -> None:
            if waiting:  # The first gradient records the call; gradients of further outputs come to the same call.
                self._latest_call = waiting.pop()
                self._counts.calls.append(self._latest_call)

        for each in outputs:
            each.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _note_error(self, error: BaseException) -> None:
        """Count an error that means out of memory."""
        self._counts.memory_errors += is_out_of_memory(error, 0.0)

    # Backward passes, compiled functions, autocast

    def _wrap_backward(self) -> None:
        """Wrap torch's backward pass, to count it and its out-of-memory errors, and updates made within it as one."""

        def watched(backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Run and count a backward pass; then report the update that an optimizer made within it."""
            if is_in_autograd():
                # Reentrant checkpointing runs backward passes of its own within one.
                return backward(*args, **kwargs)
            self.listener.backward_begins(args[0] if args else kwargs.get("tensors"))
            was_on = self._hook is not None
            if not self._looks_closely:
                # Calls that are recomputed within need no hooks.
                self._disable_hook()
            try:
                result = backward(*args, **kwargs)
            except Exception as error:
                self._note_error(error)
                raise
            finally:
                if was_on:
                    self._enable_hook()
            self._counts.backward_passes += 1
            self._has_gone_backward = True
            stepped, self._stepped_within = self._stepped_within, None
            self.listener.backward_ends()
            if stepped is not None:
                self.listener.optimizer_begins(stepped)
                self.listener.optimizer_ends(stepped)
            return result

        self._replace(torch.autograd, "backward", watched)

    def _wrap_compile(self) -> None:
        """Wrap ``torch.compile``: note its use, and record calls of compiled functions, within which no hook is on."""

        def watched(compile_: Callable[..., Any], model: Any = None, **options: Any) -> Any:
            self.compiles = True
            made = compile_(model, **options)
            if model is None or isinstance(model, torch.nn.Module):
                # A decorator, which calls torch.compile again; or a module, whose call itself is not compiled.
                return made
            return self._recorded_like_a_module(made, getattr(model, "__self__", None))

        self._replace(torch, "compile", watched)

    def _recorded_like_a_module(self, made: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        """Return the compiled function ``made``, its calls recorded as those of ``owner`` where that is a module."""

        @functools.wraps(made)
        def call(*given: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or self._hook is None:
                return made(*given, **named)
            self._disable_hook()
            if isinstance(owner, torch.nn.Module):
                self.model = owner if self.model is None else self.model
                self.listener.call_begins(trains=torch.is_grad_enabled())
            try:
                result = made(*given, **named)
            except Exception as error:
                self._note_error(error)
                raise
            finally:
                self._enable_hook()
            if isinstance(owner, torch.nn.Module):
                self._report_call(owner, given, named, result)
                self._record_call(owner, given, named, result)
            return result

        return call

    def _wrap_autocast(self) -> None:
        """Record every autocast that is entered while gradients are enabled, except to float32."""

        def entered(enter: Callable[..., Any], context: Any) -> Any:
            cast = _autocast_record(context.device, context.fast_dtype) if context._enabled else None
            if cast is not None and torch.is_grad_enabled():
                self.autocasts.add(cast)
            return enter(context)

        self._replace(torch.autocast, "__enter__", entered)

    def take_replay(self) -> None:
        """Count the latest call and its backward pass once more, for a replayed CUDA graph."""
        if self.is_removed:
            return
        assert self._latest_call is not None, "a graph is captured after steps that were seen"
        self._counts.calls.append(self._latest_call)
        self._counts.backward_passes += 1

    # Updates

    def _begin_update(self, optimizer: Any) -> None:
        """Report an optimizer step; one within a backward pass is reported at the end of the pass."""
        self._has_optimizer = True
        if not is_in_autograd():
            self.listener.optimizer_begins(optimizer)

    def _end_update(self, optimizer: Any) -> None:
        """Record the end of an optimizer step and, before the timed steps, which parameters have gradients."""
        self._has_gone_backward = False
        if (found := getattr(optimizer, "found_inf", None)) is not None:
            self._found_inf.append(found)  # A fused optimizer skips its update by itself.
        if self._looks_closely and (found is None or not bool(found.item())):
            named = dict(self.model.named_parameters()) if self.model is not None else {}
            updated = {id(each): each for group in optimizer.param_groups for each in group["params"]}
            self.has_gradients |= any(getattr(each, "grad", None) is not None for each in updated.values())
            # DeepSpeed updates copies of the parameters, and takes their gradients away before.
            if not self.has_gradients or any(id(each) in updated for each in named.values()):
                self.trained = (self.trained or set()) | {key for key, each in named.items() if each.grad is not None}
        if is_in_autograd():
            # An optimizer that steps for each parameter as soon as its gradient exists: together one update.
            self._stepped_within = optimizer
        else:
            self.listener.optimizer_ends(optimizer)

    @property
    def untrained(self) -> list[str]:
        """Names of the model's parameters that require a gradient but had none in any recorded update."""
        named = self.model.named_parameters() if self.model is not None and self.trained is not None else ()
        return [name for name, each in named if each.requires_grad and name not in (self.trained or ())]


def _autocast_record(device: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return the record of an autocast; ``None`` for one to float32, which changes nothing.

    Scripts such as nanoGPT enter one to float32. torch disables that on a CPU, and leaves it enabled on a GPU.
    """
    return (device, dtype_name(dtype)) if dtype is not torch.float32 else None


@functools.cache
def _names_of_inputs(kind: type) -> tuple[str, ...]:
    """Return the parameter names of a module class's ``forward``, without ``self``; none where they are unknown."""
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        # A scripted module's forward is no function.
        return ()


def _real_tokens(called: Any, given: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor | int | None:
    """Return the attention mask of a model call, whose sum is its tokens without padding.

    Without a mask, return the number of all tokens; ``None`` without ``input_ids``, and for a mask of another shape.
    The mask is not summed here, which would take time in a step and, on a GPU, make the host wait.
    """
    passed: Mapping[str, Any] = named
    if given and isinstance(given[0], Mapping):
        # Models of sentence-transformers take the batch as one dictionary.
        passed = given[0]
    elif given:
        # A compiled module's own signature has no names of inputs.
        kind: Any = type(getattr(called, "_orig_mod", called))
        passed = {**dict(zip(_names_of_inputs(kind), given, strict=False)), **named}
    tokens, mask = passed.get("input_ids"), passed.get("attention_mask")
    if not isinstance(tokens, torch.Tensor):
        return None
    if mask is None:
        return tokens.numel()
    # A mask of four dimensions says which tokens attend to which.
    return mask.detach() if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape else None


def _storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 without one."""
    try:
        return local_part(tensor).untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        # A parameter of a lazy module has no memory before its first call.
        return 0


def shapes_in(value: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the first tensors in a nested value, with each list's length before its tensors."""
    shapes = (
        tuple(map(int, part.shape)) if isinstance(part, torch.Tensor) else (len(part),)
        for _, part in parts_by_place(value, depth=3)
        if isinstance(part[0] if isinstance(part, list) and part else part, torch.Tensor)
    )
    return list(itertools.islice(shapes, _MOST_TENSORS))
