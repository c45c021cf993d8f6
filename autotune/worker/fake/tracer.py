"""Record when every storage of a fake training step is allocated and freed.

torch needs about 150 µs for an operation on fake tensors, most of it for the key of its own cache and for kinds of
tensors that no training step has (symbolic sizes, sparse ones). The layers of a model repeat the same operations: of
6,980 in a step of BERT-large, 186 are different ones.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from autotune.worker.fake.operations import OperationTally
from autotune.worker.private.torch import (
    FakeTensor,
    copy_fake,
    is_in_autograd,
    is_plain_fake,
    is_view,
    local_part,
    on_resize,
    without_dispatch,
)

_REFUSED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operations whose result depends on values, or whose argument gets other sizes in place."""

_MOST_VALUES = 64
"""Most values of a call that gets a key. Longer arguments, such as all parameters of an optimizer, do not repeat."""

Key = tuple[Any, ...]
_Maker = Callable[[Sequence[Any]], Any]
"""Makes a result for the arguments of a call."""


class Shortcuts:
    """The results of operations by their arguments: shapes, strides and dtypes of tensors, and all other values."""

    def __init__(self) -> None:
        self._makers: dict[Key, _Maker | None] = {}
        self._has_key: dict[int, bool] = {}
        self._is_silent: dict[int, bool] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Key | None:
        """Return a key of everything that an operation's result depends on; ``None`` where that is unknown."""
        # By identity, as operations are never freed, and their own hash is computed in Python.
        number = id(func)
        has_key = self._has_key.get(number)
        if has_key is None:
            has_key = func.namespace == "aten" and not any(tag in func.tags for tag in _REFUSED_TAGS)
            self._has_key[number] = has_key
        if not has_key:
            return None
        found: list[Any] = [number, torch.get_default_dtype()]
        if not _append_description(args, found):
            return None
        if kwargs:
            found += kwargs
            if not _append_description(kwargs.values(), found):
                return None
        key = tuple(found)
        try:
            hash(key)
        except TypeError:
            # A symbolic size, say.
            return None
        return key

    def result(self, key: Key | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Return the result of an operation, copied from an earlier call with the same key if there is one."""
        if key is None:
            return None if self._changes_only(func, args) else func(*args, **(kwargs or {}))
        make = self._makers.get(key)
        if make is not None:
            return make(args)
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves(tuple((kwargs or {}).values())) if isinstance(leaf, torch.Tensor)]
        # A tensor that is given by name may be what an operation writes to and returns.
        self._makers[key] = None if given else _maker(args, out)
        return out

    def _changes_only(self, func: Any, args: Sequence[Any]) -> bool:
        """Return whether an operation only changes values of fake tensors in place, as optimizers' kernels do."""
        number = id(func)
        if number not in self._is_silent:
            named = func.namespace == "aten" and func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
            self._is_silent[number] = named and not func._schema.returns
        if not self._is_silent[number]:
            return False
        return all(type(leaf) is FakeTensor for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))


def _append_description(values: Any, found: list[Any]) -> bool:
    """Append to ``found`` what a result depends on; return whether this is known for every value."""
    if len(values) > _MOST_VALUES:
        return False
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                # A number whose value torch knows, with which it computes.
                return False
            stride = value.stride()
            found += (value.shape, stride, value.dtype, value.storage_offset(), value.requires_grad)
            if 0 in stride:
                # The bytes that an expanded tensor has in memory.
                found.append(value.untyped_storage().nbytes())
        elif kind is list or kind is tuple:
            found += (kind, len(value))
            if not _append_description(value, found):
                return False
        elif isinstance(value, torch.Tensor):
            return False
        else:
            # With the type, since 1, 1.0 and True are equal but give different results.
            found += (kind, value)
    return True


def _maker(args: Sequence[Any], out: Any) -> _Maker | None:
    """Return a function that creates a result like ``out`` from arguments like ``args``; ``None`` where impossible."""
    if isinstance(out, torch.Tensor):
        return _maker_of_part(args, out)
    if type(out) not in (list, tuple):
        return None
    tensors = [each for each in out if isinstance(each, torch.Tensor)]
    if len({each.untyped_storage()._cdata for each in tensors}) < len(tensors):
        return None
    makers: list[_Maker] = []
    for each in out:
        maker = _maker_of_part(args, each)
        if maker is None:
            return None
        makers.append(maker)
    kind = type(out)
    return lambda given: kind([maker(given) for maker in makers])


def _maker_of_part(args: Sequence[Any], out: Any) -> _Maker | None:
    """Return a function that creates a value like ``out``, one part of a result; ``None`` where impossible."""
    if not isinstance(out, torch.Tensor):
        # An absent gradient, or a length.
        return (lambda given: out) if out is None or type(out) is int else None
    for position, value in enumerate(args):
        if value is out:
            return lambda given: given[position]
    if not is_plain_fake(out):
        return None
    shape, stride, dtype, offset = out.shape, out.stride(), out.dtype, out.storage_offset()
    model = dict(vars(out))
    storage = out.untyped_storage()
    sharing = [i for i, value in enumerate(args) if any(_shares(leaf, storage) for leaf in tree_leaves(value))]
    if sharing:
        viewed = sharing[0]
        if not isinstance(args[viewed], FakeTensor) or args[viewed].dtype != dtype:
            return None

        def view(given: Sequence[Any]) -> Any:
            with without_dispatch():
                meta = torch.as_strided(given[viewed], shape, stride, offset)
            return copy_fake(meta, model)

        return view
    with without_dispatch():
        alike = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if offset or alike.untyped_storage().nbytes() != storage.nbytes():
        # A view of a larger tensor that the operation made, such as one with padding.
        return None

    def fresh(_: Sequence[Any]) -> Any:
        with without_dispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return copy_fake(meta, model)

    return fresh


def _shares(value: Any, storage: torch.UntypedStorage) -> bool:
    """Return whether a value is a tensor with this storage."""
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage._cdata


DEATH = -1
"""In place of a size: the allocation is released."""

Events = list[tuple[int, int]]
"""``(allocation, bytes)`` for an allocation, ``(allocation, DEATH)`` for its release."""

_CPU = torch.device("cpu")
# Found once: looking up an operation takes a tenth of the time of repeating its result.
_DEVICE = torch.ops.prim.device.default
_SCALAR = torch.ops.aten._local_scalar_dense.default
_NONZERO = torch.ops.aten.nonzero.default
_ALL = torch.ops.aten.all.default
_ADD = torch.ops.aten.add.Tensor
_DROPOUT = torch.ops.aten.native_dropout.default
_ADDMM = torch.ops.aten.addmm.default
_SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
_SUM = torch.ops.aten.sum.dim_IntList
_WITH_WORKSPACES = frozenset(
    id(product)
    for product in (torch.ops.aten.mm.default, _ADDMM, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
)
"""Matrix products, by their identity."""


@dataclass
class Trace:
    """What a step allocates and frees, in bytes before rounding. Allocations are named by numbers."""

    events: Events = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    """The kind of each allocation: ``weights``, ``gradients``, ``optimizer``, ``inputs``, ``workspaces``,
    ``communication``, ``activations``."""
    column_sums: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Allocations that are scratch memory of a reduction, with the rows and columns that it sums."""
    pieces: dict[int, int] = field(default_factory=dict)
    """Allocations that a fused loss makes for each piece of its logits, with the number of all logits."""
    streams: dict[int, int] = field(default_factory=dict)
    """The number of the CUDA stream that each allocation is made in; without allocations of the default stream."""
    parts: dict[str, int] = field(default_factory=dict)
    """Index of the event at which each part of the step begins; events before the first are set-up."""


class StorageTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each storage as allocated when an operation first returns it, and as freed when nothing refers to it."""

    def __init__(
        self, workspace_bytes: tuple[int, int], operations: OperationTally | None, *, has_padding: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._workspace_bytes = workspace_bytes
        self._kept: set[tuple[bool, int]] = set()
        self.phase = "activations"
        """The label of new allocations."""
        self._has_padding = has_padding
        """Whether samples are padded, so that masks have false elements."""
        self.logits = 0
        """Number of logits that a fused loss is about to compute in pieces; 0 outside of it."""
        self._true: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._shortcuts = Shortcuts()
        self._number = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._references: dict[int, weakref.ref[Any]] = {}
        self._streams: dict[int, int] = {}
        """Numbers of CUDA streams; empty where allocations in different streams are not told apart."""
        self._gradients: dict[int, list[int]] = {}
        """Allocations that became a parameter's gradient, by the index of the event that followed."""
        self.operations = operations
        """Counts the operations; ``None`` where they are not counted."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping ``__torch_dispatch__`` for compilers, which takes a fifth of the tracing time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return an operation's result; record what the operation would allocate on a GPU, and count it."""
        if func is _DEVICE:
            # The most frequent call. There is only one device.
            return _CPU
        if func is _SCALAR:
            # Read by code that drops whole layers at random: 1 is never below the drop rate.
            return 1.0 if args[0].dtype.is_floating_point else bool(self._true.get(args[0]))  # type: ignore[no-untyped-call]
        key = None
        if func is _NONZERO:
            # Which elements are true is not known. In a synthetic batch, where every label counts, all are.
            out: Any = torch.empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        else:
            key = self._shortcuts.key(func, args, kwargs)
            out = self._shortcuts.result(key, func, args, kwargs)
        if self.operations is not None and self.operations.counts_as is not None:
            self.operations.add(func, args, out, key)
        if func is _ALL:
            # Called on masks that transformers fills with ones where the batch has none, and then drops.
            self._true[out] = not self._has_padding
        if func is _ADD and _accumulates_in_place(args):
            # The result takes over the allocation of its first operand, as after an addition in place.
            held = self._known.pop(args[0].untyped_storage(), None)  # type: ignore[no-untyped-call]
            if held is None:
                self.see(out)
            else:
                self._know(out.untyped_storage(), held)
            return out
        if isinstance(out, torch.Tensor):
            self.see(out)
        elif out is not None:
            leaves = tree_leaves(out)
            # CUDA's dropout allocates its mask before its result (native_dropout_cuda).
            for leaf in reversed(leaves) if func is _DROPOUT else leaves:
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
        if id(func) in _WITH_WORKSPACES:
            self._keep_workspaces(with_bias=func is _ADDMM)
        if func is _SOFTMAX_BACKWARD:
            # The product of gradient and output (softmax_backward_cuda_out in SoftMax.cu).
            self._borrow(args[0].numel() * args[0].element_size())
        if func is _SAFE_SOFTMAX:
            # Masks of masked scores and of wholly masked rows (aten/src/ATen/native/transformers/attention.cpp).
            masked = self.hold("workspaces", out.numel())
            self._borrow(out.numel() // out.shape[args[1]])
            self.let_go(masked)
        if func is _SUM and (columns := out.numel()):
            # The scratch memory of CUDA's sum over all but the last dimension, such as a bias gradient.
            source = args[0]
            if source.dim() >= 2 and source.shape[-1] == columns and source.is_contiguous():
                number = self.hold("workspaces", 0)
                self.let_go(number)
                self.trace.column_sums[number] = (source.numel() // columns, columns)
        return out

    def so_far(self) -> Trace:
        """Return a copy of the trace so far."""
        return dataclasses.replace(self.trace, events=list(self.trace.events))

    def enter(self, part: str, phase: str) -> None:
        """Begin a part of the step; new allocations get the label of this phase."""
        self.trace.parts[part] = len(self.trace.events)
        self.phase = phase

    def forget_freed(self) -> None:
        """Remove all events of allocations that are freed by now from the trace."""
        freed = {number for number, size in self.trace.events if size == DEATH}
        self.trace.events = [event for event in self.trace.events if event[0] not in freed]

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Record the creation of a parameter's gradient.

        In a repeated micro-step the new gradient is freed at this point, once it is added to the existing one.
        """
        assert parameter.grad is not None
        number = self._known.get(parameter.grad.untyped_storage())  # type: ignore[no-untyped-call]
        self._gradients.setdefault(len(self.trace.events), []).append(number)

    def repeat_micro_step(self, part: str) -> bool:
        """Record the events since a part began once more, as in a later micro-step with existing gradients.

        Gradients are then added to in place, and cuBLAS keeps its workspaces. Where anything else outlives the part, or
        ends in it without having begun in it, nothing is recorded, and ``False`` is returned. For twenty models of the
        catalog the sequence was that of a traced second micro-step, except for the order of some simultaneous releases.
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
                again[number] = copy = self.hold(self.trace.labels[number], size)
                if number in self.trace.column_sums:
                    self.trace.column_sums[copy] = self.trace.column_sums[number]
                if number in self.trace.pieces:
                    self.trace.pieces[copy] = self.trace.pieces[number]
        self._end_gradients(begins + len(events), again)
        return True

    def _end_gradients(self, position: int, again: dict[int, int]) -> None:
        """Record the release of gradients at this position of a repeated micro-step."""
        for number in self._gradients.get(position, ()):
            if number in again:
                self.let_go(again.pop(number))

    def hold(self, label: str, size_bytes: int) -> int:
        """Record an allocation; return its number for ``let_go``."""
        self._number += 1
        self.trace.events.append((self._number, size_bytes))
        self.trace.labels[self._number] = label
        if self.logits:
            self.trace.pieces[self._number] = self.logits
        if self._streams and (stream := self._stream()):
            self.trace.streams[self._number] = stream
            if label == "activations":
                self.trace.labels[self._number] = "communication"
        return self._number

    def _stream(self) -> int:
        """Return the number of the current stream, 0 for the default stream.

        Code for any device selects streams on a CPU as well, where they do nothing.
        """
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))

    def let_go(self, number: int) -> None:
        """Record the release of an allocation by ``hold``."""
        self.trace.events.append((number, DEATH))

    def see(self, tensor: torch.Tensor, label: str | None = None) -> None:
        """Record the tensor's storage if it is new; a ``label`` renames it in any case.

        For a sharded tensor this is the storage of the local part.
        """
        storage = local_part(tensor).untyped_storage()
        number: int | None = self._known.get(storage)  # type: ignore[no-untyped-call]
        if number is None:
            if storage.nbytes() == 0:
                return
            number = self.hold(self.phase, storage.nbytes())
            self._know(storage, number)
        if label is not None:
            self.trace.labels[number] = label

    def overlook(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exclude a tensor's storage from the trace and return the tensor, since its memory is recorded otherwise."""
        self._known[tensor.untyped_storage()] = 0
        return tensor

    def follow_resizes(self) -> None:
        """Record storages that are resized in place, as FSDP does with gathered weights.

        Replaces a function of torch for the rest of this process.
        """
        # The default stream gets number 0.
        self._stream()
        on_resize(self._resized)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record a resize of a storage as a release and an allocation."""
        number = self._known.pop(storage, None)  # type: ignore[no-untyped-call]
        if number is not None and self._references.pop(number, None) is not None:
            self.let_go(number)
        if size_bytes := storage.nbytes():
            label = self.phase if number is None else self.trace.labels[number]
            self._know(storage, self.hold(label, size_bytes))

    def _know(self, storage: torch.UntypedStorage, number: int) -> None:
        """Register a storage with the number of its allocation, and record its release."""

        def died(_: Any) -> None:
            self.let_go(number)
            self._references.pop(number, None)

        self._known[storage] = number
        self._references[number] = weakref.ref(storage, died)

    def _keep_workspaces(self, *, with_bias: bool) -> None:
        """Record cuBLAS's workspace at a thread's first matrix product, and cuBLASLt's at its first with a bias.

        Both stay. Autograd has a thread of its own, which also recomputes checkpoints.
        """
        in_autograd = is_in_autograd()
        for size_bytes in self._workspace_bytes if with_bias else self._workspace_bytes[:1]:
            if (in_autograd, size_bytes) not in self._kept:
                self._kept.add((in_autograd, size_bytes))
                self.hold("workspaces", size_bytes)

    def _borrow(self, size_bytes: int) -> None:
        """Record an allocation that an operation makes and frees beside its results."""
        self.let_go(self.hold("workspaces", size_bytes))


def _accumulates_in_place(args: Any) -> bool:
    """Return whether autograd would add these two gradients in place for real tensors; for fake ones it never does.

    It does so outside grad mode (in which checkpoints are recomputed), if nothing else holds the first one's storage,
    as the base of a view does (torch/csrc/autograd/input_buffer.cpp and functions/accumulate_grad.h).
    """
    if not is_in_autograd() or torch.is_grad_enabled():
        return False
    first, second = args[:2]
    if is_view(first):
        return False
    return isinstance(second, torch.Tensor) and first.shape == second.shape and first.dtype == second.dtype


def fake_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fake CPU tensor of the same shape, with floats as ``dtype``, within a mode of fake tensors."""
    return torch.empty(tensor.shape, dtype=dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype)


def materialise(model: torch.nn.Module, fake: Callable[[torch.Tensor], torch.Tensor] = fake_of) -> None:
    """Replace every ``meta`` parameter and buffer by a tensor of ``fake``; tied weights stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new: Any = fake(tensor)
                    is_parameter = own is module._parameters
                    made[id(tensor)] = torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                own[name] = made[id(tensor)]
