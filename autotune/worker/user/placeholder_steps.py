"""Time a script with placeholders from one step of its optimizer to the next, where it did what it was told."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from autotune.core.candidate import Candidate
from autotune.core.code_interface import HowItSteps
from autotune.core.placeholders import placeholders_in
from autotune.worker.private.torch import on_loaded_batch
from autotune.worker.trial.listener import ShapesByPlace
from autotune.worker.trial.measure import StepTimer
from autotune.worker.user.loop_steps import StepMarks

# So many steps in which the script did not do what it was told, before any in which it did, are no accident.
_MOST_OTHERWISE = 3
# The same in the midst of a training, or with so many times the backward passes of a step before the next. A choice.
_MOST_LATER = 40


class PlaceholderSteps(StepMarks):
    """Divides what is observed into whole steps, and has those measured in which the script did what it was told."""

    def __init__(
        self,
        name: str,
        candidate: Candidate,
        how: HowItSteps,
        timer: StepTimer,
        *,
        is_told_passes: bool,
        on_begin: Callable[[], None],
        on_step: Callable[[], None],
        refuse: Callable[[str], NoReturn],
    ) -> None:
        super().__init__(name, timer)
        self._candidate = candidate
        self._how = how
        self._timer = timer
        self._on_begin = on_begin
        self._on_step = on_step
        self._refuse = refuse
        accumulation, site = candidate.gradient_accumulation_steps, how.site
        self._wanted_passes = how.passes_once + how.passes * accumulation
        batch = candidate.per_device_train_batch_size
        self._wanted_rows = site.factor * site.calls * batch * accumulation if site is not None else 0
        self._is_told_passes = is_told_passes or not self._wanted_rows
        """Whether a step is to have just as many; else what it makes of its samples is its own."""
        self._may_skip = candidate.arm.precision == "fp16"
        self._optimizers: list[Any] = []
        self._has_begun = False
        self._whole_steps = self._passes = self._rows = 0
        self.otherwise = 0
        """How many steps in a row were not as it was told."""
        self.told_otherwise = ""
        """What it did in the last of them."""
        self._loading = Loading()
        self._models = ModelNames()
        # Now, since within the call of a model its checks would be turned on for the modules in it.
        timer.begin()

    def call_begins(self, *, trains: bool) -> None:
        """Begin with the first one that trains."""
        if trains:
            self._begin()

    def call_ends(self, called: Any, shapes: ShapesByPlace, *, trains: bool) -> None:
        """Count the samples that went in."""
        if trains and self._how.site is not None:
            self._rows += self._how.site.rows(self._models.name(called), shapes)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._on_begin()
            self._loading.take()
            self._timer.start_clock()
            self._timer.step_begins()

    def backward_begins(self, tensors: Any) -> None:
        """Keep the loss; what an optimizer did before was not the end of the step."""
        self._begin()
        self._marks = None
        super().backward_begins(tensors)

    def backward_ends(self) -> None:
        """Mark the end of a micro-step, unless it is the last."""
        self._passes += 1
        passes = self._passes - self._how.passes_once
        if passes > 0 and passes % self._how.passes == 0 and self._passes < self._wanted_passes:
            self._timer.micro_step_ends()
        most = self._wanted_passes if self._is_told_passes else max(self._wanted_passes, self._wanted_rows)
        if self._passes > _MOST_LATER * most:
            self._refuse(f"{self._name} made {self._passes} backward passes without a step of its optimizer")

    def optimizer_ends(self, optimizer: Any) -> None:
        """Mark the end of the update, and end the step with that of the anchor."""
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        mark = self._timer.mark()
        # Where its closure made the backward pass, nothing tells what of the step was its own.
        self._marks = (self._marks or (mark,))[0], mark
        if self._has_begun and optimizer is next(iter(self._optimizers[self._how.anchor :]), None):
            self._end_step()

    def _end_step(self) -> None:
        assert self._marks is not None
        marks, passes, rows = self._marks, self._passes, self._rows
        is_whole = rows == self._wanted_rows and (passes == self._wanted_passes or not self._is_told_passes)
        self._marks = None
        self._passes = self._rows = 0
        wait_seconds = self._loading.take()
        if not is_whole:
            self._refuse_if_lasting(passes, rows)
            self._timer.step_is_dropped()
        else:
            self._on_step()
            self._whole_steps += 1
            self.otherwise = 0
            self._timer.step_ends(marks, wait_seconds)
        self._timer.step_begins()

    def _refuse_if_lasting(self, passes: int, rows: int) -> None:
        """End the trial of a script that never does what it was told.

        A gradient scaler may leave steps out, whose backward passes then come with those of the next.
        """
        if self._may_skip and passes > self._wanted_passes and passes % self._wanted_passes == 0:
            return
        self.otherwise += 1
        self.told_otherwise = self._describe_otherwise(passes, rows)
        if self.otherwise > (_MOST_LATER if self._whole_steps else _MOST_OTHERWISE):
            self._refuse(self.told_otherwise)

    def _describe_otherwise(self, passes: int, rows: int) -> str:
        asked = f"{self._candidate.per_device_train_batch_size} × {self._candidate.gradient_accumulation_steps}"
        site = self._how.site
        if passes != self._wanted_passes or site is None:
            return (
                f"{self._name} makes {passes} backward passes for a step of its optimizer, and {asked} makes "
                f"{self._wanted_passes}"
            )
        seen = rows / site.factor / site.calls
        return (
            f"{self._name} puts {seen:g} samples into {site.model.partition('#')[0]} for a step of its optimizer, "
            f"and {asked} makes {self._wanted_rows // site.factor // site.calls}"
        )


def set_variables(named: tuple[tuple[str, str], ...], values: dict[str, str]) -> None:
    """Set the variables of a command line in this process, and remove those with placeholders that have no value."""
    for name, said in named:
        if name in values:
            os.environ[name] = values[name]
        elif placeholders_in(said):
            os.environ.pop(name, None)


class ModelNames:
    """Names the outermost models in the order of their first calls that compute gradients: ``GPT#0``.

    Of other calls the first may come by chance: a policy that explores, or its target.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def name(self, module: Any) -> str:
        """Return the name of a module."""
        if id(module) not in self._names:
            self._names[id(module)] = f"{type(unwrapped(module)).__name__}#{len(self._names)}"
        return self._names[id(module)]


def unwrapped(module: Any) -> Any:
    """Return the user's module in what ``torch.compile``, Fabric or DDP made of it."""
    for name in ("_orig_mod", "_original_module", "module"):
        inner = getattr(module, name, None)
        if isinstance(inner, torch.nn.Module) and type(module).__module__.startswith(("torch.", "lightning")):
            return unwrapped(inner)
    return module


class Loading:
    """How long batches of data loaders are waited for from now on, and with how many processes they are loaded."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.workers = 0
        self.prefetch: int | None = None
        self.batches: Any = None
        """What chose the samples of the last batch; a ``BatchSampler`` unless the script has one of its own."""
        on_loaded_batch(self._loaded)

    def _loaded(self, iterator: Any, seconds: float) -> None:
        self.seconds += seconds
        self.workers = getattr(iterator, "_num_workers", 0)
        self.batches = getattr(iterator, "_index_sampler", None)
        self.prefetch = getattr(iterator, "_prefetch_factor", None)

    def take(self) -> float:
        """Return the seconds since it was asked for last."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
