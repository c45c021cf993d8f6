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

from autotune.worker.fake.operations import OperationTally
from autotune.worker.private.torch import is_in_autograd, is_view

DEATH = -1
"""In place of a size: the allocation is given back."""

EMPTY_CACHE = -2
"""In place of a size: no allocation, but every segment that is wholly free is given back to the device."""

Events = list[tuple[int, int]]
"""``(allocation, bytes)`` for a birth, ``(allocation, DEATH)`` for a death, ``(0, EMPTY_CACHE)``."""

_MATRIX_PRODUCTS = frozenset(
    (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
    )
)


@dataclass
class Trace:
    """What a step allocates and frees, unrounded."""

    events: Events = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    """What each is: ``weights``, ``gradients``, ``optimizer``, ``inputs``, ``workspaces``, ``activations``."""
    column_sums: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Allocations that are a reduction's scratch, with the rows and columns that it sums."""
    embeddings: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Allocations in which an embedding's gradient is summed, with its indices, rows and columns."""
    parts: dict[str, int] = field(default_factory=dict)
    """The event at which each part of the step begins; what comes before them all is set-up."""


class StorageTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down each storage when an operation first returns it and when nothing holds it any more."""

    def __init__(self, workspace_bytes: tuple[int, int] = (0, 0), operations: OperationTally | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._workspace_bytes = workspace_bytes
        self._kept: set[tuple[bool, int]] = set()
        self.phase = "activations"
        """The label of what is born from now on."""
        self.has_padding = False
        """Whether some of a batch is masked out, so that masks are not all true."""
        self._true: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._number = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._references: dict[int, weakref.ref[Any]] = {}
        self._gradients: dict[int, list[int]] = {}
        """Allocations that became a parameter's gradient, by the event before which they did."""
        self.operations = operations
        """Where operations are counted, if they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            # Three quarters of all calls; there is one device.
            return torch.device("cpu")
        if func is torch.ops.aten._local_scalar_dense.default:
            # Asked for by code that drops whole layers at random: no draw is ever low enough.
            return 1.0 if args[0].dtype.is_floating_point else bool(self._true.get(args[0]))  # type: ignore[no-untyped-call]
        if func is torch.ops.aten.nonzero.default:
            # Which elements are true is unknown; in a synthetic batch, where every label counts, all are.
            out: Any = torch.empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        else:
            out = func(*args, **(kwargs or {}))
        if self.operations is not None and self.operations.counts_as is not None:
            self.operations.add(func, args, out)
        if func is torch.ops.aten.all.default:
            # Asked of masks that transformers fills with ones where the batch brings none, and then drops.
            self._true[out] = not self.has_padding
        if func is torch.ops.aten.add.Tensor and _accumulates_in_place(args):
            self._inherit(args[0], out)
            return out
        leaves = tree_leaves(out)
        # CUDA's dropout allocates its mask before its result (native_dropout_cuda).
        for leaf in reversed(leaves) if func is torch.ops.aten.native_dropout.default else leaves:
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        if func is torch.ops.aten.embedding_dense_backward.default:
            number = self.hold("workspaces", 0)
            self.let_go(number)
            self.trace.embeddings[number] = (args[1].numel(), args[2], args[0].shape[-1])
        if func in _MATRIX_PRODUCTS:
            self._keep_workspaces(with_bias=func is torch.ops.aten.addmm.default)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            self._borrow(_flash_backward_bytes(args[1]))
        if func is torch.ops.aten._softmax_backward_data.default:
            # The product of gradient and output (softmax_backward_cuda_out in SoftMax.cu).
            self._borrow(args[0].numel() * args[0].element_size())
        if func is torch.ops.aten._safe_softmax.default:
            # Which scores are masked, and which rows as a whole (aten/src/ATen/native/transformers/attention.cpp).
            masked = self.hold("workspaces", out.numel())
            self._borrow(out.numel() // out.shape[args[1]])
            self.let_go(masked)
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

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """A parameter has just got its gradient: when a micro-step comes again, the new one dies here."""
        assert parameter.grad is not None
        number = self._known.get(parameter.grad.untyped_storage())  # type: ignore[no-untyped-call]
        self._gradients.setdefault(len(self.trace.events), []).append(number)

    def repeat_micro_step(self, part: str) -> bool:
        """Take down once more what happened since a part began, as it goes where gradients are there already.

        They are added to in place, and cuBLAS has its workspaces. Whether that is all the difference: where anything
        else outlives the part, or ends in it without having begun in it, nothing is taken down. Of twenty models of the
        catalog the sequence is the one that a second micro-step gives, but for the order of some simultaneous deaths.
        """
        begins = self.trace.parts[part]
        events = self.trace.events[begins:]
        alive = {number for number, size in events if size != DEATH}
        if any(number not in alive for number, size in events if size == DEATH):
            return False
        alive -= {number for number, size in events if size == DEATH}
        gradients = {number for given in self._gradients.values() for number in given}
        others = {number for number in alive - gradients if self.trace.labels[number] != "workspaces"}
        if others or gradients - alive:
            return False
        again: dict[int, int] = {}
        for position, (number, size) in enumerate(events, begins):
            self._end_gradients(position, again)
            if size == DEATH:
                self.let_go(again[number])
            elif number in gradients or number not in alive:
                again[number] = self._hold_again(number, size)
        self._end_gradients(begins + len(events), again)
        return True

    def _hold_again(self, number: int, size_bytes: int) -> int:
        copy = self.hold(self.trace.labels[number], size_bytes)
        if number in self.trace.column_sums:
            self.trace.column_sums[copy] = self.trace.column_sums[number]
        if number in self.trace.embeddings:
            self.trace.embeddings[copy] = self.trace.embeddings[number]
        return copy

    def _end_gradients(self, position: int, again: dict[int, int]) -> None:
        for number in self._gradients.get(position, ()):
            if number in again:
                self.let_go(again.pop(number))

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

    def _keep_workspaces(self, *, with_bias: bool) -> None:
        """cuBLAS allocates a workspace at a thread's first product, cuBLASLt at its first with a bias; both stay.

        Autograd has a thread of its own, in which checkpoints are recomputed, too.
        """
        in_autograd = is_in_autograd()
        for size_bytes, is_needed in zip(self._workspace_bytes, (True, with_bias), strict=True):
            if is_needed and (in_autograd, size_bytes) not in self._kept:
                self._kept.add((in_autograd, size_bytes))
                self.hold("workspaces", size_bytes)

    def _borrow(self, size_bytes: int) -> None:
        """Memory that an operation takes for itself once its results are there, and gives back at its end."""
        self.let_go(self.hold("workspaces", size_bytes))

    def _inherit(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Take a result to be where its first operand was, as after an addition in place."""
        storage = new.untyped_storage()
        number = self._known.pop(old.untyped_storage(), None)  # type: ignore[no-untyped-call]
        if number is None:
            self.see(new)
            return
        self._known[storage] = number
        self._references[number] = weakref.ref(storage, self._death_of(number))

    def _reduction(self, source: torch.Tensor, total: torch.Tensor) -> None:
        """CUDA's sum over all but the last dimension (a bias gradient, say) borrows memory while it runs."""
        columns = total.numel()
        if columns and source.dim() >= 2 and source.shape[-1] == columns and source.is_contiguous():
            number = self.hold("workspaces", 0)
            self.let_go(number)
            self.trace.column_sums[number] = (source.numel() // columns, columns)


def _accumulates_in_place(args: Any) -> bool:
    """Whether autograd adds up two gradients, which it does in place but for subclasses such as fake tensors.

    torch/csrc/autograd/input_buffer.cpp and functions/accumulate_grad.h: outside grad mode (in
    which checkpoints are recomputed), if nothing else holds the first one's storage, as the base of a view does.
    """
    if not is_in_autograd() or torch.is_grad_enabled():
        return False
    first, second = args[:2]
    if is_view(first):
        return False
    return isinstance(second, torch.Tensor) and first.shape == second.shape and first.dtype == second.dtype


def _flash_backward_bytes(query: torch.Tensor) -> int:
    """What the backward pass of flash attention sums the queries' gradient in: float32, rows rounded to 128.

    mha_bwd in csrc/flash_attn/flash_api.cpp; 390 MiB for 256 × 12 heads × 512 × 64 on an H200.
    """
    batch, heads, length, size = query.shape
    rows = -(-length // 128) * 128
    return 4 * batch * heads * rows * (-(-size // 32) * 32 + 1)
