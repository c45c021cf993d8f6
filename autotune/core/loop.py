"""Define what a user's own training loop uses: ``LoopConfig``, which it is given, ``steps`` and ``step``.

In a training by itself they do nothing: ``steps(loader)`` gives the loader's batches. In a trial, ``listen`` has them
tell where each micro-step begins and ends.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from autotune.core.candidate import PRECISIONS, Candidate, Precision
from autotune.core.errors import InvalidRequestError

Batch = TypeVar("Batch")

FIELDS = {
    "batch": "per_device_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "precision": "precision",
    "checkpointing": "gradient_checkpointing",
}
"""The settings of a candidate that a loop may use, each with the property of ``LoopConfig`` that returns it."""


class LoopConfig:
    """The settings that a loop is to train with. It remembers which were read: others cannot be searched.

    ``train(LoopConfig(**json.load(file)))`` trains with what ``autotune export`` wrote.
    """

    def __init__(
        self,
        per_device_batch_size: int = 8,
        gradient_accumulation_steps: int = 1,
        precision: Precision = "fp32",
        gradient_checkpointing: bool = False,
    ) -> None:
        if precision not in PRECISIONS:
            raise InvalidRequestError(f"precision {precision!r} is not known", f"use one of {', '.join(PRECISIONS)}")
        self._values = {
            "per_device_batch_size": per_device_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "precision": precision,
            "gradient_checkpointing": gradient_checkpointing,
        }
        self.was_read: set[str] = set()
        """Names of the settings that were read."""

    def _read(self, name: str) -> Any:
        """Return a setting, and remember that it was read."""
        self.was_read.add(name)
        return self._values[name]

    @property
    def per_device_batch_size(self) -> int:
        """Samples in a batch of the training data."""
        return int(self._read("per_device_batch_size"))

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches whose gradients are added up before the optimizer steps."""
        return int(self._read("gradient_accumulation_steps"))

    @property
    def precision(self) -> Precision:
        """``fp32``, ``tf32``, ``bf16`` or ``fp16``; for the last two see ``autocast``."""
        return self._read("precision")  # type: ignore[no-any-return]

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether activations are recomputed in the backward pass."""
        return bool(self._read("gradient_checkpointing"))

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Return ``torch.autocast`` for bf16 or fp16 on ``"cuda"`` or ``"cpu"``, else a context that does nothing."""
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(self.precision)
        if dtype is None:
            return contextlib.nullcontext()
        torch = importlib.import_module("torch")
        context: contextlib.AbstractContextManager[Any] = torch.autocast(device_type, getattr(torch, dtype))
        return context

    def __repr__(self) -> str:
        return f"LoopConfig({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def loop_arguments(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate's settings as keyword arguments of ``LoopConfig``."""
    return {
        "per_device_batch_size": candidate.per_device_train_batch_size,
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        "precision": candidate.arm.precision,
        "gradient_checkpointing": candidate.arm.gradient_checkpointing,
    }


class Listener(Protocol):
    """What a trial registers to measure a loop: it is told where each micro-step begins and ends."""

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, each as one micro-step."""
        ...

    def micro_step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager whose block is one micro-step."""
        ...


_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Register the one listener that ``steps`` and ``step`` call in this process."""
    _listeners[:] = [listener]


def steps(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Return the batches of a loader, one for each forward and backward pass; your loop steps the optimizer itself."""
    return _listeners[0].batches(loader) if _listeners else iter(loader)


def step() -> contextlib.AbstractContextManager[None]:
    """Return a context manager for one forward and backward pass, for loops without a loader."""
    return _listeners[0].micro_step() if _listeners else contextlib.nullcontext()
