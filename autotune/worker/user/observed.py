"""See how any code trains by what torch itself tells: calls of models, backward passes, steps of optimizers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.modules import module as torch_modules

from autotune.worker.private.torch import is_in_autograd, on_checkpoint, on_loaded_batch

Shapes = dict[str, tuple[int, ...]]
"""The shapes of the tensors that a model is called with, by where they stand: ``0``, ``1.input_ids``, ``labels``."""


class Observer(Protocol):
    """What is told of a training."""

    def model_is_called(self, name: str, shapes: Shapes, *, trains: bool) -> None:
        """Take in a call of an outermost model; one that ``trains`` computes gradients."""
        ...

    def backward_begins(self, tensors: Any) -> None:
        """Take in the start of a backward pass, with what it begins from."""
        ...

    def backward_ends(self) -> None:
        """Take in the end of a backward pass."""
        ...

    def optimizer_begins(self, optimizer: Any) -> None:
        """Take in the start of an optimizer's step."""
        ...

    def optimizer_ends(self, optimizer: Any) -> None:
        """Take in the end of an optimizer's step."""
        ...


def observe(observer: Observer) -> ModelCalls:
    """Tell an observer of everything that trains in this process from now on."""
    backward = torch.autograd.backward

    def watched(tensors: Any, *words: Any, **options: Any) -> Any:
        if is_in_autograd():
            # Checkpointing of the older kind runs passes of its own within one.
            return backward(tensors, *words, **options)
        observer.backward_begins(tensors)
        answer = backward(tensors, *words, **options)
        observer.backward_ends()
        return answer

    torch.autograd.backward = watched
    # torch.optim deletes the name of this module of its own.
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: observer.optimizer_begins(optimizer))
    optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: observer.optimizer_ends(optimizer))
    calls = ModelCalls(observer.model_is_called)
    calls.watch()
    return calls


class ModelCalls:
    """Tells of calls of the outermost modules that have parameters, not of what is called within them.

    A hook on all modules finds each of them at its first call, and is off while that runs: a compiler would trace the
    hook. From then on a hook of that module tells, which is outside of what is compiled.
    """

    def __init__(self, on_call: Callable[..., None]) -> None:
        self._on_call = on_call
        self._depth = 0
        self._names: dict[int, str] = {}
        self._handle: Any = None
        self._is_settled = False
        self.first: Any = None
        """The module that was called first of those that train."""

    def watch(self) -> None:
        """Find the outermost modules from now on."""
        if self._handle is None and not self._is_settled:
            self._handle = torch_modules.register_module_forward_pre_hook(self._found)

    def settle(self) -> None:
        """Look for no further modules: the hook on all of them takes time in each call."""
        self._is_settled = True
        self._unwatch()

    def _unwatch(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _found(self, module: Any, given: tuple[Any, ...]) -> None:
        # In a backward pass, parts of a model are called that recompute their activations.
        if self._depth or is_in_autograd() or id(module) in self._names or next(module.parameters(), None) is None:
            return
        name = f"{type(unwrapped(module)).__name__}#{len(self._names)}"
        self._names[id(module)] = name
        module.register_forward_pre_hook(self._begins, with_kwargs=True)
        module.register_forward_hook(self._ends, always_call=True)
        # This call is under way, and has not these hooks yet, but for the one at its end.
        self._begins(module, given, {})

    def _begins(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or is_in_autograd():
            return
        self._unwatch()
        trains = torch.is_grad_enabled()
        if trains and self.first is None:
            self.first = module
        self._on_call(self._names[id(module)], dict(_shapes((*given, named))), trains=trains)

    def _ends(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self.watch()


def unwrapped(module: Any) -> Any:
    """Return the user's module in what ``torch.compile``, Fabric or DDP made of it."""
    for name in ("_orig_mod", "_original_module", "module"):
        inner = getattr(module, name, None)
        if isinstance(inner, torch.nn.Module) and type(module).__module__.startswith(("torch.", "lightning")):
            return unwrapped(inner)
    return module


def _shapes(value: Any, path: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes of all tensors in a value, with where they stand."""
    if isinstance(value, torch.Tensor):
        yield path, tuple(value.shape)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _shapes(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for at, part in enumerate(value):
            yield from _shapes(part, f"{path}.{at}" if path else str(at))


@dataclass
class Numerics:
    """The precision and checkpointing that a training was seen to use, whether it enters them itself or within a
    library."""

    autocast: set[str] = field(default_factory=set)
    """The dtypes of autocast contexts that were entered while gradients were computed."""
    checkpoints: bool = False

    def watch(self) -> None:
        """Take them down from now on."""
        kind: Any = torch.autocast
        enter = kind.__enter__
        seen = self

        def __enter__(context: Any) -> Any:  # noqa: N807
            if getattr(context, "_enabled", True) and torch.is_grad_enabled():
                seen.autocast.add(str(context.fast_dtype).removeprefix("torch."))
            return enter(context)

        kind.__enter__ = __enter__
        on_checkpoint(self._take_checkpoint)

    def look(self) -> None:
        """Take the state at a model's call down: the autocast may be one that is on for good."""
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device) and torch.is_grad_enabled():
                self.autocast.add(str(torch.get_autocast_dtype(device)).removeprefix("torch."))

    def _take_checkpoint(self) -> None:
        if torch.is_grad_enabled():
            self.checkpoints = True


class Loading:
    """How long the batches of data loaders were waited for, and with how many processes they are loaded."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.workers = 0
        self.prefetch: int | None = None

    def watch(self) -> None:
        """Take it down from now on."""
        on_loaded_batch(self._loaded)

    def _loaded(self, iterator: Any, seconds: float) -> None:
        self.seconds += seconds
        self.workers = getattr(iterator, "_num_workers", 0)
        self.prefetch = getattr(iterator, "_prefetch_factor", None)

    def take(self) -> float:
        """Return the seconds since it was asked for last."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
