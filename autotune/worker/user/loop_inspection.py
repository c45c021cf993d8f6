"""Look at a script's own training loop up to its second step: which loader it trains with, and how it accumulates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from autotune.core.inspection import ModelFacts
from autotune.worker.trial.listener import Listener
from autotune.worker.user.adapter import Inspecting
from autotune.worker.user.script_options import watch_options


class LoopInspection(Listener):
    """What a loop is seen to train with; the loader is the one whose batch came last before a backward pass."""

    def __init__(self, inspecting: Inspecting) -> None:
        from autotune.worker.trial.training_watch import TrainingWatch

        self.inspecting = inspecting
        self.options = watch_options()
        self.loader: Any = None
        self.passes = 0
        """Backward passes of a step."""
        self._watch = TrainingWatch()
        self._watch.listener = self
        self._given: Any = None
        self._steps = 0

    def install(self) -> Callable[[], bool]:
        """Watch from now on; return what tells whether the script has begun to train."""
        self._watch.install(calls=False)
        return self.is_at_work

    def facts(self) -> ModelFacts:
        """Return what the script trains with."""
        raise NotImplementedError

    def accumulates_itself(self) -> bool:
        """Return whether the framework says how the script accumulates, so that no second step is needed."""
        return False

    def take_loader(self) -> None:
        """Record the loader that the script trains with."""
        self.loader = self._given

    def is_at_work(self) -> bool:
        """Return whether the script has begun to train."""
        return self._given is not None

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Give the batches of a loader."""
        for batch in batches():
            self._given = loader
            yield batch

    def backward_begins(self, tensors: Any) -> None:
        """Take down which loader is trained with, and count the pass."""
        if not self.is_at_work():
            return
        if self.loader is None:
            self.take_loader()
        self.passes += 1

    def optimizer_ends(self, optimizer: Any) -> None:
        """End the inspection once it is known how the script accumulates."""
        if self.loader is None:
            return
        self._steps += 1
        if self.accumulates_itself() or self._steps == 2:
            self.finish()
        self.passes = 0

    def finish(self) -> None:
        """End the process with what was seen."""
        from autotune.worker.user.inspection import check_gradients

        check_gradients(self._watch, self.inspecting.source)
        self.inspecting.finish(self.facts())

    def accumulates_by(self) -> Literal["accelerator", "option", "script"]:
        """Return what decides the accumulation."""
        if self.accumulates_itself():
            return "accelerator"
        return "option" if self.options.values.get("gradient_accumulation_steps") == self.passes else "script"
