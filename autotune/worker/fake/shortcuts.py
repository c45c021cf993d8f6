"""Repeat what an operation on fake tensors returned, where its arguments have shapes that were seen before.

torch needs about 150 µs for an operation on fake tensors, most of it for the key of its own cache and for kinds of
tensors that no training step has (symbolic sizes, sparse ones). The layers of a model repeat the same operations: of
6,980 in a step of BERT-large, 186 are different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autotune.worker.private.fake_tensors import FakeTensor, copy_fake, is_plain_fake, without_dispatch

_REFUSED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Of operations whose result depends on values, or whose argument gets other sizes in place."""

_MOST_VALUES = 64
"""Longer arguments, such as all parameters of an optimizer, are those of a call that is not repeated."""

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
        if not _describe(args, found):
            return None
        if kwargs:
            found += kwargs
            if not _describe(kwargs.values(), found):
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


def _describe(values: Any, found: list[Any]) -> bool:
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
                # How much of an expanded tensor there is in memory.
                found.append(value.untyped_storage().nbytes())
        elif kind is list or kind is tuple:
            found += (kind, len(value))
            if not _describe(value, found):
                return False
        elif isinstance(value, torch.Tensor):
            return False
        else:
            # 1, 1.0 and True are equal, and have other results.
            found += (kind, value)
    return True


def _maker(args: Sequence[Any], out: Any) -> _Maker | None:
    """Return a function that creates results like ``out`` from such arguments; ``None`` where unknown."""
    if isinstance(out, torch.Tensor):
        return _maker_of_part(args, out)
    if type(out) not in (list, tuple):
        return None
    tensors = [each for each in out if isinstance(each, torch.Tensor)]
    if len({each.untyped_storage()._cdata for each in tensors}) < len(tensors):
        return None
    makers = [_maker_of_part(args, each) for each in out]
    makers_known = [maker for maker in makers if maker is not None]
    kind = type(out)
    return (lambda given: kind([maker(given) for maker in makers_known])) if len(makers_known) == len(makers) else None


def _maker_of_part(args: Sequence[Any], out: Any) -> _Maker | None:
    """Return a function that creates a value like ``out``, one part of a result; ``None`` where unknown."""
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
        # The view of something that the operation made, such as one with padding.
        return None

    def fresh(_: Sequence[Any]) -> Any:
        with without_dispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return copy_fake(meta, model)

    return fresh


def _shares(value: Any, storage: torch.UntypedStorage) -> bool:
    """Return whether a value is a tensor with this storage."""
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage._cdata
