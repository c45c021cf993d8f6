"""Births and deaths of every storage of a fake training step, in order."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

DEATH = -1
"""In place of a size: the allocation is given back."""

Events = list[tuple[int, int]]
"""``(allocation, bytes)`` for a birth, ``(allocation, DEATH)`` for a death."""


@dataclass
class Trace:
    """What a step allocates and frees, unrounded."""

    events: Events = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    """What each is: ``weights``, ``gradients``, ``optimizer``, ``inputs``, ``workspaces``, ``activations``."""
    column_sums: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Allocations that are a reduction's scratch, with the rows and columns that it sums."""
    parts: dict[str, int] = field(default_factory=dict)
    """The event at which each part of the step begins; what comes before them all is set-up."""


class StorageTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down each storage when an operation first returns it and when nothing holds it any more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.phase = "activations"
        """The label of what is born from now on."""
        self._number = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._references: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            # Three quarters of all calls; there is one device.
            return torch.device("cpu")
        if func is torch.ops.aten._local_scalar_dense.default:
            # Asked for by code that drops whole layers at random: no draw is ever low enough.
            return 1.0 if args[0].dtype.is_floating_point else 0
        if func is torch.ops.aten.nonzero.default:
            # Which elements are true is unknown; in a synthetic batch, where every label counts, all are.
            out: Any = torch.empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        if func is torch.ops.aten.sum.dim_IntList:
            self._reduction(args[0], out)
        return out

    def so_far(self) -> Trace:
        """What was taken down by now, untouched by what dies later."""
        return dataclasses.replace(self.trace, events=list(self.trace.events))

    def enter(self, part: str, phase: str) -> None:
        """Begin a part of the step, what is born in it being of this phase."""
        self.trace.parts[part] = len(self.trace.events)
        self.phase = phase

    def hold(self, label: str, size_bytes: int) -> int:
        """Take down an allocation that no tensor owns; it stays unless ``let_go`` is called with its number."""
        self._number += 1
        self.trace.events.append((self._number, size_bytes))
        self.trace.labels[self._number] = label
        return self._number

    def let_go(self, number: int) -> None:
        """The end of what ``hold`` began."""
        self.trace.events.append((number, DEATH))

    def see(self, tensor: torch.Tensor, label: str | None = None) -> None:
        """Take down the tensor's storage unless it is known; a ``label`` renames it either way."""
        storage = tensor.untyped_storage()
        number: int | None = self._known.get(storage)  # type: ignore[no-untyped-call]
        if number is None:
            if storage.nbytes() == 0:
                return
            number = self._known[storage] = self.hold(self.phase, storage.nbytes())
            self._references[number] = weakref.ref(storage, self._death_of(number))
        if label is not None:
            self.trace.labels[number] = label

    def _death_of(self, number: int) -> Callable[[Any], None]:
        def died(_: Any) -> None:
            self.let_go(number)
            self._references.pop(number, None)

        return died

    def _reduction(self, source: torch.Tensor, total: torch.Tensor) -> None:
        """CUDA's sum over all but the last dimension (a bias gradient, say) borrows memory while it runs."""
        columns = total.numel()
        if columns and source.dim() >= 2 and source.shape[-1] == columns and source.is_contiguous():
            number = self.hold("workspaces", 0)
            self.let_go(number)
            self.trace.column_sums[number] = (source.numel() // columns, columns)
