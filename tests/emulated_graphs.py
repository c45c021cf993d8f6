"""CUDA graphs on a CPU: operations are recorded with the tensors they read and write, and run again on the same ones.

As with a real graph, a replay reads and writes fixed addresses, capturing computes nothing that stays, and random
numbers are drawn anew by each replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class EmulatedGraph:
    """Has the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def replay(self) -> None:
        """Run the recorded operations again, each into the tensors that it wrote."""
        with torch.no_grad():
            for function, args, kwargs, outputs in self.operations:
                again = pytree.tree_leaves(function(*args, **kwargs))
                for old, new in zip(outputs, again, strict=True):
                    if old is not None and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: EmulatedGraph) -> None:
        super().__init__()
        self._graph = graph
        self._made: set[int] = set()
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments):
            known = {tensor.data_ptr() for tensor, _ in self.before}
            self.before += [
                (tensor, tensor.clone())
                for tensor in inputs
                if tensor.untyped_storage().data_ptr() not in self._made and tensor.data_ptr() not in known
            ]
        result = function(*args, **kwargs)
        outputs = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(result)]
        shared = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for output in outputs:
            if output is not None and output.untyped_storage().data_ptr() not in shared:
                self._made.add(output.untyped_storage().data_ptr())
        self._graph.operations.append((function, args, kwargs, outputs))
        return result


@contextmanager
def capture(graph: EmulatedGraph, pool: object = None, stream: object = None) -> Iterator[None]:
    """Record what runs within, as ``torch.cuda.graph`` does."""
    random = torch.get_rng_state()
    recorder = _Recorder(graph)
    asks, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
    try:
        with recorder:
            yield
    finally:
        torch.cuda.is_current_stream_capturing = asks
    for tensor, value in recorder.before:
        tensor.detach().copy_(value)
    torch.set_rng_state(random)


class EmulatedStream:
    """Has the place of ``torch.cuda.Stream``: a CPU runs everything in the order of the program."""

    def wait_stream(self, other: object) -> None:
        """Return at once."""


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stand-ins take the place of the functions of ``torch.cuda``."""
    for name, stand_in in _stand_ins().items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("beginAllocateToPool", "endAllocateToPool", "releasePool"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda device, pool: None)


def _stand_ins() -> dict[str, Any]:
    return {
        "CUDAGraph": EmulatedGraph,
        "Stream": EmulatedStream,
        "current_stream": lambda device: EmulatedStream(),
        "empty_cache": lambda: None,
        "get_rng_state": lambda device: torch.get_rng_state(),
        "graph": capture,
        "graph_pool_handle": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "set_rng_state": lambda state, device: torch.set_rng_state(state),
        "stream": lambda stream: nullcontext(),
    }
