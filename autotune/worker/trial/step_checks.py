"""Check that the steps that are timed train, by what torch itself tells of them, whatever the loop around them is.

``TrainingWatch`` counts: outermost calls of modules to whose results a gradient came back, with the shapes that went
in; backward passes; optimizer steps. ``StepChecks`` compares that with what a step should have done.

Little of it is done in timed steps. Only the outermost call of a module has a hook, which is off within that call: the
modules in it run as they do without any hook, and a compiler that traces them finds none. Gradients and weights are
looked at in steps that are not timed.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.nn.modules import module as modules

from autotune.core.outcome import FailureReason
from autotune.worker.failures import is_out_of_memory
from autotune.worker.private.torch import is_in_autograd, local_part, packs_saved_tensors

# Of a model's output these are hooked at most, and of its input looked at. A choice.
_MOST_TENSORS = 16
# Elements of each parameter that are compared before and after an update. A choice.
_COMPARED_ELEMENTS = 4096
# Arguments with which the samples of a batch come as one row (transformers' DataCollatorWithFlattening).
_OF_PACKED_ROWS = frozenset(("position_ids", "cu_seq_lens_q", "cu_seqlens", "seq_idx"))
# Calls of which it is looked at what they compute with. The first may be of a model that is not trained. A choice.
_LOOKED_WITHIN = 4
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_FRAMEWORKS = (
    "torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "trl", "peft",
    "sentence_transformers", "autotune", "contextlib", "functools", "threading", "runpy",
)  # fmt: skip


Shapes = tuple[tuple[int, ...], ...]
"""Of tensors; the length of a list of tensors comes before theirs."""

# What torch tells


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an outermost module with parameters, to whose result a gradient came back."""

    module: str
    """Its class."""
    module_id: int
    shapes: Shapes
    """Of the tensors that went in."""
    is_packed: bool
    """Whether the samples came as one row, as its arguments show."""

    @property
    def rows(self) -> int:
        """Most samples that may have gone in: the largest first dimension."""
        return max((shape[0] for shape in self.shapes if shape), default=0)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen since it was asked for last."""

    calls: tuple[Call, ...] = ()
    forward_calls: int = 0
    """Calls of outermost modules with parameters that ended, in training mode or with gradients asked for."""
    backward_passes: int = 0
    """Those that ended."""
    optimizer_steps: int = 0
    """Of all optimizers together."""
    skipped_steps: int = 0
    """Those of them in which a gradient scaler had the optimizer change nothing."""
    memory_errors: int = 0
    """Calls and backward passes that ended with out of memory, whoever caught that."""
    is_elsewhere: bool = False
    """Whether a backward pass ran in another thread than the one that asks."""


class TrainingWatch:
    """Counts what is trained in this process, from ``install`` on."""

    def __init__(self) -> None:
        self.autocasts: set[tuple[str, str]] = set()
        """Device and dtype of each autocast that was entered: ``("cuda", "bfloat16")``."""
        self.weight_dtypes: set[str] = set()
        """Dtype of the first parameter of each module that was trained with."""
        self.recomputes = False
        """Whether modules were called within a backward pass, as activation checkpointing does."""
        self.place: str | None = None
        """``train.py:12``: the line of the user's that called the first module."""
        self.model: Any = None
        """The first module that was called."""
        self.update: Update | None = None
        """What the updates did that were looked at so far; ``None`` where there was none."""
        self.inner_sizes: set[tuple[int, ...]] = set()
        """The first two dimensions of what the first calls kept for the backward pass, parameters aside."""
        self._is_close = True
        self._keeping: Any = None
        self._looked_within = 0
        self._is_fed_within_backward = False
        self._hook: Any = None
        self._after_hook: Any = None
        self._latest: Call | None = None
        self._weights_before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._has_parameters: dict[int, bool] = {}
        self._found_inf: list[Any] = []
        self._thread = threading.get_ident()
        self._forget()

    def _forget(self) -> None:
        self._calls: list[Call] = []
        self._forward_calls = self._backward_passes = self._optimizer_steps = self._memory_errors = 0
        self._is_elsewhere = False
        self._found_inf.clear()

    def install(self) -> None:
        """Watch from now on."""
        # It would fire for a compiled module and what is in it; it is off there.
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        self._turn_on()
        self._wrap_backward()
        self._wrap_compile()
        self._wrap_autocast()
        # torch.optim deletes the name of this module of its own.
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_update(optimizer))
        optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: self._after_update(optimizer))

    def begin(self) -> None:
        """Forget what was seen before the training."""
        self.take()
        self.model = self.place = None

    def take(self) -> Seen:
        """Return what was seen since the last time; waits for the device where a gradient scaler is at work."""
        skipped = sum(bool(found.item()) for found in self._found_inf)
        seen = Seen(
            tuple(self._calls),
            self._forward_calls,
            self._backward_passes,
            self._optimizer_steps,
            skipped,
            self._memory_errors,
            self._is_elsewhere,
        )
        self._thread = threading.get_ident()
        self._forget()
        self._turn_on()
        return seen

    def begin_timed(self) -> None:
        """Look at no gradients and weights any more, and at nothing within backward passes that need not be."""
        self._is_close = False
        self._weights_before.clear()

    # Calls of modules

    def _turn_on(self) -> None:
        if self._hook is None:
            self._hook = modules.register_module_forward_pre_hook(self._before_call)

    def _turn_off(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_call(self, called: Any, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._turn_off()
        if self.model is None:
            # What torch.compile made of it has no class and config of its own.
            self.model = getattr(called, "_orig_mod", called)
        if self._is_close and self.place is None:
            self.place = _users_line()
        if is_in_autograd():
            self.recomputes = True
        self._after_hook = called.register_forward_hook(self._after_call, with_kwargs=True, always_call=True)
        looks = self._is_close and self._looked_within < _LOOKED_WITHIN and torch.is_grad_enabled()
        # Hooks of checkpointing around the call would not come to act.
        if looks and not packs_saved_tensors():
            self._look_within(called)

    def _look_within(self, called: torch.nn.Module) -> None:
        """Take down the sizes of what is kept for the backward pass of this call."""
        own = {_storage(each) for each in (*called.parameters(), *called.buffers())}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and _storage(tensor) not in own:
                self.inner_sizes.add(tuple(tensor.shape[:2]))
            # An output that is kept by what it was computed with would never be freed without a backward pass.
            return tensor if tensor.is_leaf else tensor.detach()

        self._looked_within += bool(own)
        self._keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        self._keeping.__enter__()

    def _after_call(self, called: Any, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        self._after_hook.remove()
        if self._keeping is not None:
            self._keeping.__exit__()
            self._keeping = None
        self._turn_on()
        # Where the call failed there is no result, and this is called from where its error is handled.
        if result is None and (error := sys.exc_info()[1]) is not None:
            self._note(error)
        elif (called.training or torch.is_grad_enabled()) and self._can_be_trained(called):
            self._take_call(called, given, named, result)

    def _can_be_trained(self, called: Any) -> bool:
        known = self._has_parameters.get(id(called))
        if known is None:
            first = next(called.parameters(), None)
            known = self._has_parameters[id(called)] = first is not None
            if first is not None:
                self.weight_dtypes.add(str(first.dtype).removeprefix("torch."))
        return known

    def _take_call(self, called: Any, given: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        self._forward_calls += 1
        outputs = [each for each in tensors_in(result) if each.requires_grad and not each.is_leaf]
        if not outputs:
            return
        shapes = tuple(shapes_in((*given, *named.values())))
        call = Call(type(called).__name__, id(called), shapes, not _OF_PACKED_ROWS.isdisjoint(named))
        is_within_backward = is_in_autograd()
        is_new = True

        def arrive(_: Any) -> None:
            nonlocal is_new
            if is_new:
                is_new = False
                self._calls.append(call)
                self._latest = call
                self._is_fed_within_backward = self._is_fed_within_backward or is_within_backward

        for each in outputs:
            each.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _note(self, error: BaseException) -> None:
        self._memory_errors += is_out_of_memory(error, 0.0)

    # Backward passes, compiled functions, autocast

    def _wrap_backward(self) -> None:
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def watched(*words: Any, **options: Any) -> Any:
            if is_in_autograd():
                return backward(*words, **options)
            was_on = self._hook is not None
            if not self._is_close and not self._is_fed_within_backward:
                # What is recomputed there needs no hooks.
                self._turn_off()
            try:
                result = backward(*words, **options)
            except Exception as error:
                self._note(error)
                raise
            finally:
                if was_on:
                    self._turn_on()
            self._backward_passes += 1
            self._is_elsewhere = self._is_elsewhere or threading.get_ident() != self._thread
            return result

        watched.unwatched = getattr(backward, "unwatched", backward)  # type: ignore[attr-defined]
        torch.autograd.backward = watched

    def _wrap_compile(self) -> None:
        """Have no hooks of modules within compiled functions, whose calls are taken for those of a module."""
        compile_ = torch.compile

        @functools.wraps(compile_)
        def watched(model: Any = None, **options: Any) -> Any:
            made: Any = compile_(model, **options)
            if model is None or isinstance(model, torch.nn.Module):
                # A decorator, which comes here again; or a module, whose call is not compiled itself.
                return made
            return self._around(made, getattr(model, "__self__", None))

        torch.compile = watched

    def _around(self, made: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        @functools.wraps(made)
        def call(*given: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or self._hook is None:
                return made(*given, **named)
            self._turn_off()
            if self.model is None and isinstance(owner, torch.nn.Module):
                self.model = owner
            try:
                result = made(*given, **named)
            except Exception as error:
                self._note(error)
                raise
            finally:
                self._turn_on()
            if isinstance(owner, torch.nn.Module) and torch.is_grad_enabled() and self._can_be_trained(owner):
                self._take_call(owner, given, named, result)
            return result

        return call

    def _wrap_autocast(self) -> None:
        kind: Any = torch.autocast
        enter = kind.__enter__

        @functools.wraps(enter)
        def __enter__(context: Any) -> Any:  # noqa: N807
            if context._enabled:
                self.autocasts.add((context.device, str(context.fast_dtype).removeprefix("torch.")))
            return enter(context)

        kind.__enter__ = __enter__

    def take_replay(self) -> None:
        """Count the latest call, with its backward pass, once more: a captured graph runs both without Python."""
        assert self._latest is not None, "a graph is captured after steps that were seen"
        self._calls.append(self._latest)
        self._forward_calls += 1
        self._backward_passes += 1

    # Updates

    def _before_update(self, optimizer: Any) -> None:
        if self._is_close:
            self._weights_before = [(each, _part(each).clone()) for each in _parameters_of(optimizer)]

    def _after_update(self, optimizer: Any) -> None:
        self._optimizer_steps += 1
        if (found := getattr(optimizer, "found_inf", None)) is not None:
            # A fused optimizer leaves its update out by itself.
            self._found_inf.append(found)
        if not self._is_close or (found is not None and bool(found.item())):
            return
        update = _update_of(optimizer, self._weights_before)
        self._weights_before = []
        if self.update is None or update.is_honest or not self.update.is_honest:
            self.update = update


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimizer's step had to do, and did."""

    has_gradients: bool
    is_finite: bool
    is_zero: bool
    """Whether all gradients are zero."""
    is_lost: bool
    """Whether float32 weights with gradients stayed as they were, though the learning rate is not zero."""

    @property
    def is_honest(self) -> bool:
        """Whether it trained."""
        return self.has_gradients and self.is_finite and not self.is_zero and not self.is_lost


def _parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (each for each in group["params"] if isinstance(each, torch.Tensor))


@torch.no_grad()
def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first elements of a tensor, all of a sparse one's values."""
    tensor = local_part(tensor.detach())
    if tensor.layout is not torch.strided:
        return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    return tensor.reshape(-1)[:_COMPARED_ELEMENTS] if tensor.is_contiguous() else tensor[:1].reshape(-1)


@torch.no_grad()
def _update_of(optimizer: Any, before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Update:
    gradients = [each.grad for each in _parameters_of(optimizer) if each.grad is not None]
    is_finite = all(bool(torch.isfinite(_part(each)).all()) for each in gradients)
    is_zero = not any(bool(_part(each).any()) for each in gradients)
    if is_zero:
        # The first rows of an embedding may have none.
        is_zero = not any(bool(local_part(each.detach()).abs().sum() != 0) for each in gradients)
    is_lost = any(float(group.get("lr", 1)) != 0 for group in optimizer.param_groups)
    is_compared = False
    for parameter, weights in before:
        if not is_lost:
            break
        gradient = parameter.grad
        # Of fewer bits, small updates are lost in rounding.
        if gradient is None or gradient.layout is not torch.strided or parameter.dtype is not torch.float32:
            continue
        moves = _part(gradient) != 0
        if bool(moves.any()):
            is_compared = True
            is_lost = torch.equal(_part(parameter)[moves], weights[moves])
    return Update(bool(gradients), is_finite, is_zero, is_lost and is_compared)


def _storage(tensor: torch.Tensor) -> int:
    """Return what tensors on the same memory have in common; 0 for those that have none."""
    try:
        return local_part(tensor).untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        # A parameter of a lazy module has no memory before its first call.
        return 0


def tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the first tensors in a value, however it is nested."""
    yield from (each for _, each in zip(range(_MOST_TENSORS), _nested_tensors(value, depth), strict=False))


def _nested_tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for each in _parts_of(value):
            yield from _nested_tensors(each, depth - 1)


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()


def shapes_in(value: Any, depth: int = 3) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in a value, each list's length before those in it."""
    found: list[tuple[int, ...]] = []

    def add(part: Any, left: int) -> None:
        if len(found) >= _MOST_TENSORS:
            return
        if isinstance(part, torch.Tensor):
            found.append(tuple(part.shape))
        elif left:
            if isinstance(part, list) and part and isinstance(part[0], torch.Tensor):
                found.append((len(part),))
            for each in _parts_of(part):
                add(each, left - 1)

    add(value, depth)
    return found


def _users_line() -> str | None:
    """Return the innermost line on the stack that is the user's own, else of a package that is no framework."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        path, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        # The trial server runs as ``__main__``.
        is_own = path.startswith(("<", _OWN_FOLDER)) or name.partition(".")[0] in _FRAMEWORKS
        if not is_own:
            is_installed = "site-packages" in path
            if not is_installed or found is None:
                found = f"{os.path.basename(path)}:{frame.f_lineno}"
            if not is_installed:
                break
        frame = frame.f_back
    return found


# What a step should have done


@dataclass(frozen=True, slots=True)
class OtherBatch:
    """What one batch was seen to be made of, with another batch size than is trained with now."""

    batch: int
    shapes: Shapes

    def is_followed_by(self, shapes: Shapes, batch: int) -> bool:
        """Return whether these shapes are of a batch of so many samples, in one of the first two dimensions."""
        if any(batch in shape[:1] or (shape[0:1] > (1,) and shape[1:2] == (batch,)) for shape in shapes):
            return True
        if batch == self.batch or len(shapes) != len(self.shapes):
            return False
        pairs = [
            pair for now, then in zip(shapes, self.shapes, strict=True) for pair in zip(now[:2], then, strict=False)
        ]
        return any(now * self.batch == then * batch for now, then in pairs)


@dataclass(frozen=True, slots=True)
class NotTrained:
    """Why a step does not count."""

    message: str
    hint: str = ""
    is_out_of_memory: bool = False
    """Whether it lacks something for want of memory, of which somebody caught the error."""
    reason: FailureReason = "error"


class NotTrainedError(Exception):
    """A step was run that did not train."""

    def __init__(self, found: NotTrained) -> None:
        super().__init__(f"{found.message}: {found.hint}" if found.hint else found.message)
        self.found = found


class StepChecks:
    """Judges each step of a training by what a watch saw of it.

    ``out_of_memory_count`` returns how often the device's
    allocator found no memory, also where it then did with less.
    """

    def __init__(
        self,
        name: str,
        batch: int | None,
        refuse: Callable[[NotTrained], NoReturn],
        *,
        out_of_memory_count: Callable[[], int | None] = lambda: None,
        watch: TrainingWatch | None = None,
    ) -> None:
        self.watch = watch or TrainingWatch()
        self._name = name
        self._batch = batch
        """Samples of a micro-step; ``None`` where they are not known."""
        self.refuse = refuse
        """Ends the trial; called with the first step that did not train."""
        self._count = out_of_memory_count
        self.may_be_zero = False
        """Whether a step may have nothing to learn from, as where all samples of a rollout have the same reward."""
        self.other_batch: OtherBatch | None = None
        """Set where no loader says how many samples a batch has, so that its tensors have to."""
        self.precision: tuple[str, str] | None = None
        """Device and name of the precision that the code's own autocast has to be of: ``("cuda", "bf16")``."""
        self._given: list[Shapes] = []
        self._count_before: int | None = None
        self._usual: frozenset[int] | None = None
        self._is_filled = False
        """Whether a call was given as many samples as the batch has."""
        self._ran_out = False
        self._is_timed = False

    def begin(self) -> None:
        """Forget what was seen before the first step."""
        self.watch.begin()
        self._count_before = self._count()

    def begin_timed(self) -> None:
        """Judge the updates of the steps so far; those that follow are timed."""
        if self._is_timed:
            return
        self._is_timed = True
        self.watch.begin_timed()
        update, at = self.watch.update, f" ({self.watch.place})" if self.watch.place else ""
        batch, sizes = self._batch, self.watch.inner_sizes
        if batch is not None and self._is_filled and sizes and not any(_may_hold(size, batch) for size in sizes):
            self.refuse(
                NotTrained(
                    f"the model of {self._name} is given a batch of {batch} and computes with fewer samples{at}",
                    "have the model train with all samples of the batch that it is given",
                )
            )
        if self.precision is not None:
            device, precision = self.precision
            entered = {dtype for kind, dtype in self.watch.autocasts if kind == device} | self.watch.weight_dtypes
            if precision in _DTYPES and _DTYPES[precision] not in entered:
                self.refuse(
                    NotTrained(
                        f"{self._name} was asked for {precision} and enters no autocast of it on this {device}{at}",
                        f"have it enter one there, or search without {precision}",
                    )
                )
        if update is None or update.is_honest:
            return
        if not update.has_gradients:
            self.refuse(
                NotTrained(
                    f"{self._name} steps an optimizer whose parameters get no gradients{at}",
                    "make the optimizer of the parameters of the model that is trained, after the last change of it",
                )
            )
        if not update.is_finite:
            self.refuse(NotTrained(f"the gradients of {self._name} are not finite{at}", reason="non_finite"))
        if update.is_zero and not self.may_be_zero:
            self.refuse(
                self._with_memory(
                    f"all gradients of {self._name} are zero{at}", "compute its loss from the output of the model"
                )
            )
        if update.is_lost:
            self.refuse(
                NotTrained(
                    f"the optimizer of {self._name} leaves the weights as they are{at}",
                    "have it step the parameters of the model that is trained",
                )
            )

    def give(self, batch: Any) -> None:
        """Take down what a batch is made of that the code is given."""
        if self.other_batch is not None:
            self._given.append(tuple(shapes_in((batch,))))

    def step_ends(self, micro_steps: int) -> Seen:
        """Judge a whole step of so many micro-steps, and return what was seen of it."""
        seen = self._take()
        given, self._given = self._given, []
        if (found := self._problem(seen, micro_steps, given)) is not None:
            self.refuse(found)
        self._is_filled = self._is_filled or any(call.rows >= (self._batch or 0) for call in seen.calls)
        trained = frozenset(call.module_id for call in seen.calls)
        if not self._is_timed:
            self._usual = trained | (self._usual or frozenset())
        self._count_before = self._count()
        return seen

    def step_is_dropped(self) -> None:
        """Forget what was seen of a step that does not count."""
        self._take()
        self._given.clear()

    def _take(self) -> Seen:
        seen = self.watch.take()
        self._ran_out = self._ran_out or seen.memory_errors > 0
        return seen

    def has_run_out(self) -> bool:
        """Return whether a call or a backward pass ended with an error of memory so far, whoever caught it."""
        self._take()
        return self._ran_out

    def _problem(self, seen: Seen, micro_steps: int, given: Sequence[Shapes]) -> NotTrained | None:
        at = f" ({self.watch.place})" if self.watch.place else ""
        batches = f"{micro_steps} {'batch' if micro_steps == 1 else 'batches'}"
        if seen.is_elsewhere:
            return NotTrained(
                f"{self._name} makes its backward passes in another thread{at}, where their time is not seen",
                "have it train in the thread that asks for the batches",
            )
        if seen.backward_passes < micro_steps:
            return self._with_memory(
                f"{self._name} made {seen.backward_passes} backward passes in a step of {batches}{at}",
                "have each batch trained with, and no error of it caught",
                seen.memory_errors,
            )
        lacks_calls = not seen.calls and (seen.forward_calls or seen.memory_errors or self._usual)
        if lacks_calls:
            return self._with_memory(
                f"no gradient came back to the model of {self._name}{at}",
                "compute its loss from the output of the model, and catch no error of it",
                seen.memory_errors,
            )
        if self._usual is not None and self._is_timed and not self._usual <= {call.module_id for call in seen.calls}:
            return self._with_memory(
                f"{self._name} trains with other models in some steps than in its first{at}",
                "have each step train the same models",
                seen.memory_errors,
            )
        if (found := self._problem_of_batch(seen, given)) is not None:
            return found
        if self._batch is not None and not fills(seen.calls, micro_steps, self._batch):
            rows = max(call.rows for call in seen.calls)
            return self._with_memory(
                f"{self._name} gives its model {rows} samples of a batch of {self._batch}{at}",
                "have all samples of the batch go into the model",
                seen.memory_errors,
            )
        return None

    def _problem_of_batch(self, seen: Seen, given: Sequence[Shapes]) -> NotTrained | None:
        """Return what is wrong with batches whose loader does not say how large they are."""
        other, batch = self.other_batch, self._batch
        fed = [shapes for shapes in given or [call.shapes for call in seen.calls] if shapes]
        if other is None or batch is None or all(other.is_followed_by(shapes, batch) for shapes in fed):
            return None
        sizes = sorted({shapes[0][0] for shapes in fed if shapes[0]})
        at, found = f" ({self.watch.place})" if self.watch.place else "", ", ".join(map(str, sizes[:3]))
        return NotTrained(
            f"{self._name} trains with batches of {found} where {batch} samples were asked for{at}",
            "have its batches made of as many samples as it is told",
        )

    def _with_memory(self, message: str, hint: str, errors: int = 0) -> NotTrained:
        """Return why a step does not count, as out of memory where there was too little in it."""
        now = self._count()
        ran_out = errors > 0 or (now is not None and self._count_before is not None and now > self._count_before)
        if ran_out:
            return NotTrained(f"{message}, after it ran out of memory and caught the error", hint, True)
        return NotTrained(message, hint)


def _may_hold(size: tuple[int, ...], batch: int) -> bool:
    """Return whether a tensor of these first dimensions may be of all samples of a batch."""
    return size[0] % batch == 0 or size[1:] == (batch,)


def fills(calls: Sequence[Call], micro_steps: int, batch: int) -> bool:
    """Return whether all samples of a step may have gone into a model; ``True`` where no tensors are seen to go in."""
    rows: dict[int, int] = {}
    for call in calls:
        rows[call.module_id] = rows.get(call.module_id, 0) + call.rows
    if not any(rows.values()) or max(rows.values()) >= micro_steps * batch:
        return True
    # The batch is the second dimension where the first is time.
    second = any(len(shape) > 1 and shape[0] > 1 and shape[1] == batch for call in calls for shape in call.shapes)
    return second or any(call.is_packed for call in calls)
