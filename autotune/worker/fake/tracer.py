"""Record when every storage of a training step on fake tensors (with shapes, without values) is allocated and freed.

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
"""Makes an operation's result from its arguments, without calling the operation."""


class Shortcuts:
    """A cache of operations' results on fake tensors, which repeats a result faster than torch computes it.

    Its key has the operation, the shapes, strides and dtypes of its tensors, and all its other arguments.
    """

    def __init__(self) -> None:
        self._makers: dict[Key, _Maker | None] = {}
        # Whether an operation may have keys, and whether it is an optimizer's kernel without a result, by its ``id``.
        self._may_have_key: dict[int, bool] = {}
        self._returns_nothing: dict[int, bool] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Key | None:
        """Return the cache key of a call: everything that its result depends on.

        ``None`` where the result also depends on the values of tensors, or an argument cannot be part of a key.
        """
        # By identity, as operations are never freed, and their own hash is computed in Python.
        identity = id(func)
        may_have_key = self._may_have_key.get(identity)
        if may_have_key is None:
            may_have_key = func.namespace == "aten" and not any(tag in func.tags for tag in _REFUSED_TAGS)
            self._may_have_key[identity] = may_have_key
        if not may_have_key:
            return None
        parts: list[Any] = [identity, torch.get_default_dtype()]
        if not _append_key_parts(args, parts):
            return None
        if kwargs:
            parts += kwargs
            if not _append_key_parts(kwargs.values(), parts):
                return None
        key = tuple(parts)
        try:
            hash(key)
        except TypeError:
            # A symbolic size, say.
            return None
        return key

    def result(self, key: Key | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """Return the result of an operation, copied from an earlier call with the same ``key`` if there is one."""
        if key is None:
            return None if self._changes_only_values(func, args) else func(*args, **(kwargs or {}))
        make = self._makers.get(key)
        if make is not None:
            return make(args)
        out = func(*args, **(kwargs or {}))
        by_name = [leaf for leaf in tree_leaves(tuple((kwargs or {}).values())) if isinstance(leaf, torch.Tensor)]
        # A tensor that is given by name (``out=``) may be what an operation writes to and returns.
        self._makers[key] = None if by_name else _maker(args, out)
        return out

    def _changes_only_values(self, func: Any, args: Sequence[Any]) -> bool:
        """Return whether an operation only changes values of fake tensors in place, as optimizers' kernels do."""
        identity = id(func)
        if identity not in self._returns_nothing:
            is_kernel = func.namespace == "aten" and func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
            self._returns_nothing[identity] = is_kernel and not func._schema.returns
        if not self._returns_nothing[identity]:
            return False
        return all(type(leaf) is FakeTensor for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))


def _append_key_parts(values: Any, parts: list[Any]) -> bool:
    """Append to a key what an operation's result depends on of these arguments; return whether each can be in a key."""
    if len(values) > _MOST_VALUES:
        return False
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                # A number whose value torch knows, with which it computes.
                return False
            stride = value.stride()
            parts += (value.shape, stride, value.dtype, value.storage_offset(), value.requires_grad)
            if 0 in stride:
                # The bytes that an expanded tensor has in memory, which its shape does not tell.
                parts.append(value.untyped_storage().nbytes())
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            if not _append_key_parts(value, parts):
                return False
        elif isinstance(value, torch.Tensor):
            return False
        else:
            # With the type, since 1, 1.0 and True are equal but give different results.
            parts += (kind, value)
    return True


def _maker(args: Sequence[Any], out: Any) -> _Maker | None:
    """Return a function that repeats the result ``out`` of a call with ``args`` for later arguments with the same key.

    ``None`` where no such function can be made, so that the operation is always called: the result is neither a tensor
    nor a list or tuple, two of its tensors share a storage, or ``_maker_of_part`` returns ``None`` for a part.
    """
    kind = type(out)
    if isinstance(out, torch.Tensor):
        return _maker_of_part(args, out)
    if kind not in (list, tuple):
        return None
    tensors = [part for part in out if isinstance(part, torch.Tensor)]
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        return None
    makers: list[_Maker] = []
    for part in out:
        if (maker := _maker_of_part(args, part)) is None:
            return None
        makers.append(maker)
    return lambda later_args: kind([maker(later_args) for maker in makers])


def _maker_of_part(args: Sequence[Any], out: Any) -> _Maker | None:
    """Return a function that repeats one part of a call's result for later arguments: ``out``, a tensor or a value.

    The part is an argument itself, a view of one, or a new tensor. ``None`` where it is anything else, such as a view
    with another dtype, or of a larger new tensor.
    """
    if not isinstance(out, torch.Tensor):
        # An absent gradient, or a length.
        return (lambda later_args: out) if out is None or type(out) is int else None
    for position, value in enumerate(args):
        if value is out:
            return lambda later_args: later_args[position]
    if not is_plain_fake(out):
        return None
    shape, stride, dtype, offset = out.shape, out.stride(), out.dtype, out.storage_offset()
    attributes = dict(vars(out))
    storage = out.untyped_storage()
    viewed = next((i for i, value in enumerate(args) if _has_storage(value, storage)), None)
    if viewed is not None:
        if not isinstance(args[viewed], FakeTensor) or args[viewed].dtype != dtype:
            return None

        def view(later_args: Sequence[Any]) -> Any:
            with without_dispatch():
                meta = torch.as_strided(later_args[viewed], shape, stride, offset)
            return copy_fake(meta, attributes)

        return view
    with without_dispatch():
        alike = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if offset or alike.untyped_storage().nbytes() != storage.nbytes():
        # A view of a larger tensor that the operation made, such as one with padding.
        return None

    def new_tensor(_: Sequence[Any]) -> Any:
        with without_dispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return copy_fake(meta, attributes)

    return new_tensor


def _has_storage(value: Any, storage: torch.UntypedStorage) -> bool:
    """Return whether an argument is, or contains, a tensor with this storage."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return any(tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors)


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
    """What a training step allocates and frees, in bytes before rounding. Its fields name allocations by number."""

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
    """Index of the event at which each part of the step begins, by the part's name (``first inputs``, ``first
    micro-step``, …, ``update``); events before the first are set-up."""


class StorageTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a training step's memory: each storage as allocated when an operation first returns it, and as freed when
    nothing refers to it. Scratch memory that CUDA's kernels would need is recorded as well.

    ``workspace_bytes`` are the sizes of the workspaces of cuBLAS and cuBLASLt.
    """

    def __init__(self, workspace_bytes: tuple[int, int], operations: OperationTally | None, *, is_padded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._workspace_bytes = workspace_bytes
        self._kept_workspaces: set[tuple[bool, int]] = set()
        """Workspaces held already: whether by the thread of autograd, and their bytes."""
        self.phase = "activations"
        """The label of new allocations."""
        self._is_padded = is_padded
        """Whether samples are padded, so that masks have false elements."""
        self.piecewise_logits = 0
        """Number of logits that a fused loss is about to compute in pieces; 0 outside of it."""
        self._is_all_true: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The values of results of ``torch.all``, for code that reads them."""
        self._shortcuts = Shortcuts()
        self._last_number = 0
        self._number_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The number of each storage's allocation."""
        self._references: dict[int, weakref.ref[Any]] = {}
        """Weak references to storages, by allocation, whose callbacks record the release."""
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
            return 1.0 if args[0].dtype.is_floating_point else bool(self._is_all_true.get(args[0]))  # type: ignore[no-untyped-call]
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
            self._is_all_true[out] = not self._is_padded
        if func is _ADD and _accumulates_in_place(args):
            # The result takes over the allocation of its first operand, as after an addition in place.
            number = self._number_of.pop(args[0].untyped_storage(), None)  # type: ignore[no-untyped-call]
            if number is None:
                self.see(out)
            else:
                self._register(out.untyped_storage(), number)
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
                # ``column_sum_scratch_bytes`` computes its size for a chip.
                number = self._borrow(0)
                self.trace.column_sums[number] = (source.numel() // columns, columns)
        return out

    def so_far(self) -> Trace:
        """Return a copy of the trace, to whose events later releases are not added."""
        return dataclasses.replace(self.trace, events=list(self.trace.events))

    def enter(self, part: str, phase: str) -> None:
        """Record that a part of the step begins; allocations from now on get the label ``phase``."""
        self.trace.parts[part] = len(self.trace.events)
        self.phase = phase

    def forget_freed(self) -> None:
        """Remove all events of allocations that are freed by now, such as those of set-up, from the trace."""
        freed = {number for number, size in self.trace.events if size == DEATH}
        self.trace.events = [event for event in self.trace.events if event[0] not in freed]

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Remember at which event a parameter's gradient was created, for ``repeat_micro_step``.

        At this point of a later micro-step the new gradient is freed, once it is added to the existing one.
        """
        assert parameter.grad is not None
        number = self._number_of.get(parameter.grad.untyped_storage())  # type: ignore[no-untyped-call]
        self._gradients.setdefault(len(self.trace.events), []).append(number)

    def repeat_micro_step(self, part: str) -> bool:
        """Append a second micro-step to the trace: a copy of the first one's events, which begin at ``part``.

        This saves running it. New gradients are freed in the copy, as they are added to existing ones, and cuBLAS
        keeps its workspaces. Returns ``False`` and appends nothing where a copy would be wrong: the first micro-step
        keeps other allocations as well, or releases earlier ones. For twenty models of the catalog the copy equalled a
        traced second micro-step, except for the order of some simultaneous releases.
        """
        begins_at = self.trace.parts[part]
        events = self.trace.events[begins_at:]
        allocated = {number for number, size in events if size != DEATH}
        released = {number for number, size in events if size == DEATH}
        kept = allocated - released
        gradients = {number for created in self._gradients.values() for number in created}
        others = {number for number in kept - gradients if self.trace.labels[number] != "workspaces"}
        if released - allocated or others or gradients - kept:
            return False
        # By the number of an allocation, that of its copy.
        copies: dict[int, int] = {}
        for position, (number, size) in enumerate(events, begins_at):
            self._release_gradients(position, copies)
            if size == DEATH:
                self.let_go(copies[number])
            elif number in gradients or number not in kept:
                copies[number] = copy = self.hold(self.trace.labels[number], size)
                if number in self.trace.column_sums:
                    self.trace.column_sums[copy] = self.trace.column_sums[number]
                if number in self.trace.pieces:
                    self.trace.pieces[copy] = self.trace.pieces[number]
        self._release_gradients(begins_at + len(events), copies)
        return True

    def _release_gradients(self, position: int, copies: dict[int, int]) -> None:
        """Record in a copied micro-step the release of the gradients that the original created before ``position``."""
        for number in self._gradients.get(position, ()):
            if number in copies:
                self.let_go(copies.pop(number))

    def hold(self, label: str, size_bytes: int) -> int:
        """Record an allocation; return its number for ``let_go``."""
        self._last_number = number = self._last_number + 1
        self.trace.events.append((number, size_bytes))
        self.trace.labels[number] = label
        if self.piecewise_logits:
            self.trace.pieces[number] = self.piecewise_logits
        if self._streams and (stream := self._stream()):
            self.trace.streams[number] = stream
            if label == "activations":
                self.trace.labels[number] = "communication"
        return number

    def _stream(self) -> int:
        """Return the number of the current CPU stream, which code for any device selects as well; 0: the default."""
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))

    def let_go(self, number: int) -> None:
        """Record the release of the allocation to which ``hold`` gave this number."""
        self.trace.events.append((number, DEATH))

    def see(self, tensor: torch.Tensor, label: str | None = None) -> None:
        """Record the allocation of a tensor's storage, unless it is recorded already.

        A ``label`` replaces that of the allocation in any case. Of a sharded tensor the local part is recorded.
        """
        storage = local_part(tensor).untyped_storage()
        number: int | None = self._number_of.get(storage)  # type: ignore[no-untyped-call]
        if number is None:
            if storage.nbytes() == 0:
                return
            number = self.hold(self.phase, storage.nbytes())
            self._register(storage, number)
        if label is not None:
            self.trace.labels[number] = label

    def overlook(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exclude a tensor's storage from the trace and return the tensor, since its memory is recorded otherwise."""
        # 0 is the number of no allocation.
        self._number_of[tensor.untyped_storage()] = 0
        return tensor

    def follow_resizes(self) -> None:
        """Record storages that are resized in place, as FSDP's gathered weights are. Patches torch permanently."""
        # The default stream gets number 0.
        self._stream()
        on_resize(self._resized)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record a resize of a storage as a release and an allocation."""
        number = self._number_of.pop(storage, None)  # type: ignore[no-untyped-call]
        if number is not None and self._references.pop(number, None) is not None:
            self.let_go(number)
        if size_bytes := storage.nbytes():
            label = self.phase if number is None else self.trace.labels[number]
            self._register(storage, self.hold(label, size_bytes))

    def _register(self, storage: torch.UntypedStorage, number: int) -> None:
        """Remember the number of a storage's allocation, and record its release once nothing refers to the storage."""

        def died(_: Any) -> None:
            self.let_go(number)
            self._references.pop(number, None)

        self._number_of[storage] = number
        self._references[number] = weakref.ref(storage, died)

    def _keep_workspaces(self, *, with_bias: bool) -> None:
        """Record cuBLAS's workspace at a thread's first matrix product, and cuBLASLt's at the first with a bias."""
        # Both stay. Autograd has a thread of its own, which also recomputes checkpoints.
        in_autograd = is_in_autograd()
        for size_bytes in self._workspace_bytes if with_bias else self._workspace_bytes[:1]:
            if (in_autograd, size_bytes) not in self._kept_workspaces:
                self._kept_workspaces.add((in_autograd, size_bytes))
                self.hold("workspaces", size_bytes)

    def _borrow(self, size_bytes: int) -> int:
        """Record scratch memory, which an operation frees before it returns; return the number of its allocation."""
        number = self.hold("workspaces", size_bytes)
        self.let_go(number)
        return number


def _accumulates_in_place(args: Any) -> bool:
    """Return whether autograd would add two gradients (``args``) in place, had they values; fake ones it never does.

    It adds in place outside grad mode (in which checkpoints are recomputed), if nothing else holds the storage of the
    first gradient, as the base of a view does (torch/csrc/autograd/input_buffer.cpp, functions/accumulate_grad.h).
    """
    if not is_in_autograd() or torch.is_grad_enabled():
        return False
    first, second = args[:2]
    if is_view(first):
        return False
    return isinstance(second, torch.Tensor) and first.shape == second.shape and first.dtype == second.dtype


def fake_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty CPU tensor of the same shape, with floats as ``dtype``; in a fake tensor mode it is fake."""
    return torch.empty(tensor.shape, dtype=dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype)


def materialise(model: torch.nn.Module, fake: Callable[[torch.Tensor], torch.Tensor] = fake_of) -> None:
    """Replace every ``meta`` parameter and buffer by a tensor that ``fake`` makes of it. Tied weights stay tied."""
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
