"""Record what each operation of a fake training step computes and moves, to predict its time.

An operation is described by its kind, its dtype, its floating-point operations and the bytes that it reads and writes.
Equal operations are counted together. Sizes are recorded at the batch of the trace and split afterwards into a part
for each sample and a constant part, as allocations are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from autotune.core.prediction import Operation, Operations, Size
from autotune.worker.private.torch import dtype_name, is_in_autograd

FORWARD, BACKWARD, RECOMPUTATION, UPDATE = "forward", "backward", "recomputation", "update"

_MATRIX_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0}
"""By operation, the position of the first factor among its arguments."""

_SOURCES: dict[str, tuple[str, ...]] = {
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    "convolution": ("convolution", "_convolution"),
    "normalisation": (
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_fused_rms_norm",
    ),
    "softmax": ("_softmax", "_safe_softmax", "_log_softmax", "nll_loss", "nll_loss2d"),
    "reduction": (
        *("sum", "mean", "var", "var_mean", "std", "amax", "amin", "max", "min", "any", "all", "prod", "norm"),
        *("linalg_vector_norm", "cumsum", "cumprod", "argmax", "argmin", "logsumexp", "count_nonzero"),
    ),
    "copy": (
        *("_to_copy", "copy", "copy_", "clone", "cat", "stack", "repeat", "constant_pad_nd", "contiguous", "roll"),
        *("slice_backward", "select_backward", "unfold_backward", "as_strided_scatter", "slice_scatter", "flip"),
        *("_reshape_copy", "repeat_interleave", "pixel_shuffle", "im2col", "col2im"),
    ),
    "fill": (
        *("fill_", "zero_", "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "scalar_tensor"),
        *("new_zeros", "new_ones", "new_full", "bernoulli_", "uniform_", "normal_", "rand", "randn", "rand_like"),
        *("randint", "eye", "linspace"),
    ),
    "gather": (
        *("embedding", "embedding_dense_backward", "index", "index_select", "gather", "index_put", "index_put_"),
        *("_unsafe_index", "_unsafe_index_put", "_index_put_impl_", "scatter", "scatter_", "scatter_add"),
        *("scatter_add_", "gather_backward", "index_add", "index_add_", "take_along_dim", "nonzero"),
        *("masked_select", "sort", "topk"),
    ),
    "elementwise": ("native_dropout", "masked_fill_", "tril", "triu", "tril_", "triu_"),
    "nothing": (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"),
        *("lift_fresh", "sym_size", "sym_numel", "sym_stride", "device", "_local_scalar_dense", "is_pinned"),
    ),
}
_KINDS = {name: kind for kind, names in _SOURCES.items() for name in names}
_PASS = re.compile("_forward$|_backward(_data)?$")
"""Endings of the names of an operation's forward and backward pass."""
_OF_NO_KERNEL = ("prim", "profiler")
"""Namespaces of operations that the GPU does not run."""

Row = tuple[str, str, Size, Size, tuple[Size, ...]]
"""The kind, dtype, operations, bytes and shape of an ``Operation``."""


class OperationTally:
    """Counts a traced step's operations by cost: those of one micro-step and of the optimizer's update.

    ``batch`` is the traced batch: sizes that it divides are taken to grow with the batch.
    """

    def __init__(self, batch: int) -> None:
        self.counts_as: Literal["micro_step", "update"] | None = None
        """The part of the step that operations are counted for; ``None`` while none are."""
        self._batch = batch
        self._counts: dict[tuple[str, Row], int] = {}
        # Numbers of operations that the host dispatches, also without a kernel; and of those of no known kind, by name.
        self._dispatched = dict.fromkeys((FORWARD, BACKWARD, RECOMPUTATION, UPDATE), 0)
        self._unknown: dict[str, int] = {}
        self._row_of_key: dict[Any, Row | None] = {}

    def add(self, func: Any, args: Sequence[Any], out: Any, key: Any = None) -> None:
        """Count an operation for the part of the step that runs. Calls with the same ``key`` cost the same."""
        if self.counts_as is None:
            return
        if self.counts_as == "update":
            part = UPDATE
        elif not is_in_autograd():
            part = FORWARD
        else:
            # In the backward pass, gradients are tracked only where a checkpoint's forward pass runs again.
            part = RECOMPUTATION if torch.is_grad_enabled() else BACKWARD
        self._dispatched[part] += 1
        if key in self._row_of_key:
            row = self._row_of_key[key]
        else:
            row = self._cost_of(func, args, out)
            # ``_cost_of`` counts unknown operations, so it is called for each of them.
            if key is not None and (row is None or row[0] != "unknown"):
                self._row_of_key[key] = row
        if row is not None:
            self._counts[part, row] = self._counts.get((part, row), 0) + 1

    def _cost_of(self, func: Any, args: Sequence[Any], out: Any) -> Row | None:
        """Return the cost of an operation; ``None`` where the GPU runs nothing."""
        name, kind = _name_and_kind(func)
        if kind == "nothing":
            return None
        if kind == "unknown":
            self._unknown[name] = self._unknown.get(name, 0) + 1
        if kind == "matrix_product":
            return self._matrix_product(name, args)
        if kind in ("attention", "attention_backward"):
            return self._attention(kind, name, args)
        if kind == "convolution":
            return self._convolution(name, args, out)
        if kind == "fused_update":
            return self._fused_update(args)
        return self._memory_bound(kind, name, args, out)

    def operations(self, parameters: Sequence[torch.Tensor]) -> Operations:
        """Return the counted operations, with the number and bytes of the trained ``parameters``."""
        return Operations(
            tuple(Operation(part, *row, count) for (part, row), count in self._counts.items()),
            dict(self._dispatched),
            len(parameters),
            sum(parameter.nbytes for parameter in parameters),
            dict(self._unknown),
        )

    def _as_size(self, number: int) -> Size:
        """Return a size per sample and a constant size: the first if ``number`` is a multiple of the traced batch."""
        return (number // self._batch, 0) if number % self._batch == 0 else (0, number)

    def _moved_bytes(self, tensors: Iterable[torch.Tensor], times: int = 1) -> Size:
        """Return the bytes, per sample and constant, of tensors that are each read or written ``times`` times."""
        sizes = []
        for tensor in tensors:
            # The bytes in memory of an expanded tensor count once: it is read repeatedly from the cache.
            stored_bytes = tensor.untyped_storage().nbytes() if 0 in tensor.stride() else tensor.nbytes
            sizes.append(self._as_size(min(tensor.nbytes, stored_bytes) * times))
        return sum(per_sample for per_sample, _ in sizes), sum(constant for _, constant in sizes)

    def _matrix_product(self, name: str, args: Sequence[Any]) -> Row:
        """Return the cost of a matrix product: kind, dtype, FLOPs, bytes, shape."""
        position = _MATRIX_PRODUCTS[name]
        first, second = args[position], args[position + 1]
        rows, inner = first.shape[-2:]
        columns = second.shape[-1]
        products = first.shape[0] if first.dim() == 3 else 1
        flops = self._as_size(2 * products * rows * inner * columns)
        shape = tuple(self._as_size(number) for number in (products, rows, columns, inner))
        elements = (products * rows * inner, products * inner * columns, products * rows * columns)
        per_sample, constant = (sum(part) for part in zip(*map(self._as_size, elements), strict=True))
        element_bytes = first.element_size()
        moved = element_bytes * per_sample, element_bytes * constant
        return "matrix_product", dtype_name(first.dtype), flops, moved, shape

    def _attention(self, kind: str, name: str, args: Sequence[Any]) -> Row:
        """Return the cost of an attention kernel: kind, dtype, FLOPs, bytes, shape and options."""
        backward = kind == "attention_backward"
        query, key, value = args[1:4] if backward else args[0:3]
        batch, heads, length, size = query.shape
        keys = key.shape[-2]
        dropout = causal = 0
        if name in _DROPOUT_AND_CAUSAL:
            dropout, causal = (args[i] if i < len(args) else 0 for i in _DROPOUT_AND_CAUSAL[name])
        # Two matrix products forward; five backward, one of which repeats the scores (FlashAttention, Dao et al. 2022).
        flops = (5 if backward else 2) * 2 * batch * heads * length * keys * max(size, value.shape[-1])
        if causal:
            flops //= 2
        bias = args[4 if backward else 3] if "efficient" in name and len(args) > 3 else None
        # The query a second time, for the output, which is as large.
        tensors = [t for t in (query, key, value, query, bias) if isinstance(t, torch.Tensor)]
        moved = self._moved_bytes(tensors, 2 if backward else 1)
        flash = "flash" in name or "cudnn" in name
        options = (int(flash), int(isinstance(bias, torch.Tensor)), int(dropout > 0), int(causal))
        shape = *(self._as_size(number) for number in (batch, heads, length, keys, size)), *((0, o) for o in options)
        return kind, dtype_name(query.dtype), self._as_size(flops), moved, shape

    def _convolution(self, name: str, args: Sequence[Any], out: Any) -> Row:
        """Return the cost of a convolution: kind, dtype, FLOPs, bytes, and no shape."""
        backward = name == "convolution_backward"
        source, weight = (args[1], args[2]) if backward else (args[0], args[1])
        result = args[0] if backward else out
        # The backward pass computes the gradients of input and weight, where they are wanted.
        times = sum(1 for wanted in args[-1][:2] if wanted) if backward else 1
        flops = self._as_size(times * 2 * result.numel() * (weight.numel() // weight.shape[0]))
        return "convolution", dtype_name(source.dtype), flops, self._moved_bytes((source, weight, result), times), ()

    def _fused_update(self, args: Sequence[Any]) -> Row:
        """Return the cost of a fused optimizer kernel, which writes all tensors but gradients in place."""
        # Parameters, gradients, and one list for each state of the optimizer.
        lists = [list(_flatten_tensors((argument,))) for argument in args if isinstance(argument, (list, tuple))]
        read = [tensor for group in lists for tensor in group]
        written = [tensor for group in lists[:1] + lists[2:] for tensor in group]
        dtype = dtype_name(read[0].dtype) if read else "float32"
        return "fused_update", dtype, (0, 0), self._moved_bytes(read + written), ((0, len(lists[0]) if lists else 0),)

    def _memory_bound(self, kind: str, name: str, args: Sequence[Any], out: Any) -> Row:
        """Return the cost of an operation that is limited by memory traffic: kind, dtype, no FLOPs, bytes, shape."""
        read, written = list(_flatten_tensors(args)), list(_flatten_tensors((out,)))
        if kind == "fill":
            touched = written
        elif name == "copy_":
            touched = written + read[1:]
        elif name in _TAKING:
            # Only the selected rows are read.
            touched = written * 2
        else:
            touched = written + read
        largest = max(read or written, key=lambda tensor: tensor.numel(), default=None)
        dtype = dtype_name(largest.dtype) if largest is not None else "none"
        shape: tuple[Size, ...] = ()
        # Rows and columns, for kernels that reduce rows.
        if largest is not None and largest.dim() and kind in ("normalisation", "softmax", "reduction"):
            columns = largest.shape[-1]
            shape = self._as_size(largest.numel() // max(1, columns)), self._as_size(columns)
        if kind == "normalisation" and "backward" in name:
            kind = "normalisation_backward"
        elif kind == "copy":
            if _mixes_dtypes(read, written):
                kind = "cast"
            elif not all(tensor.is_contiguous() for tensor in (*read, *written)):
                kind = "transpose"
        elif name == "native_dropout":
            kind = "dropout"
        elif kind == "elementwise" and _mixes_dtypes(read, written):
            kind = "elementwise_cast"
        return kind, dtype, (0, 0), self._moved_bytes(touched), shape


def _name_and_kind(func: Any) -> tuple[str, str]:
    """Return an operation's name and kind, a key of ``_SOURCES`` or similar; for an unknown kind, the full name."""
    library, _, name = func._schema.name.partition("::")
    if func.is_view or library in _OF_NO_KERNEL:
        return name, "nothing"
    if library == "aten":
        if name in _MATRIX_PRODUCTS:
            return name, "matrix_product"
        if name in _KINDS:
            return name, _KINDS[name]
        if (kind := _KINDS.get(_PASS.sub("", name))) is not None:
            return name, "attention_backward" if kind == "attention" else kind
        if name.startswith(("_fused_ad", "_fused_sgd", "_foreach_")):
            return name, "fused_update"
        if torch.Tag.pointwise in func.tags:
            return name, "elementwise"
    return func._schema.name, "unknown"


_TAKING = frozenset(("embedding", "index", "index_select", "gather", "_unsafe_index"))

# Positions of the dropout probability and the causal flag among the arguments. One with its default may be missing.
_DROPOUT_AND_CAUSAL = {
    "_scaled_dot_product_flash_attention": (3, 4),
    "_scaled_dot_product_flash_attention_backward": (10, 11),
    "_scaled_dot_product_efficient_attention": (5, 6),
    "_scaled_dot_product_efficient_attention_backward": (9, 11),
}


def _mixes_dtypes(read: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
    """Return whether an operation's tensors have several floating dtypes, so that its kernel also converts them."""
    dtypes = {tensor.dtype for tensor in (*read, *written) if tensor.dim() and tensor.dtype.is_floating_point}
    return len(dtypes) > 1


def _flatten_tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operation, also those within lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flatten_tensors(value)
