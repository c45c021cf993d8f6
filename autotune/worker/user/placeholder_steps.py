"""Watch the steps of a script with placeholders (``{batch}``): the first two before a search, timed in a trial.

In a trial a step goes from one step of the optimizer to the next, and counts where the script did what it was told.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from autotune.core.candidate import Arm, Candidate, Precision
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import ModelFacts
from autotune.core.messages import Problem
from autotune.core.placeholders import placeholders_in
from autotune.core.training_source import TrainingSource
from autotune.core.workload import DTYPES
from autotune.space.levers import HALF
from autotune.worker.private.torch import around_batches
from autotune.worker.trial.measure import StepTimer
from autotune.worker.trial.training_watch import Listener, ShapesByPlace, TrainingWatch
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.inspection import check_gradients, facts_of, length
from autotune.worker.user.loop_steps import StepMarks
from autotune.worker.wrapping import after

# After more deviating steps in a row than this, the trial is refused, if no step was as requested before.
_MOST_DEVIATIONS = 3
# The same limit once a step was as requested; also the limit on backward passes before a step, as a multiple of those
# of a step. A choice.
_MOST_LATER_DEVIATIONS = 40


class PlaceholderSteps(StepMarks):
    """Divides a script's training into whole steps, and has the timer count those that are as requested.

    Their backward passes are counted, and the rows (samples, or tokens of samples) that enter a model at the ``Site``
    that the inspection found.
    """

    def __init__(
        self,
        name: str,
        candidate: Candidate,
        interface: CodeInterface,
        timer: StepTimer,
        *,
        on_begin: Callable[[], None],
        on_step: Callable[[], None],
        refuse: Callable[[str], NoReturn],
    ) -> None:
        super().__init__(name, timer)
        self._candidate = candidate
        self._how = how = interface.steps
        self._timer = timer
        self._on_begin = on_begin
        self._on_step = on_step
        self._refuse = refuse
        accumulation, site = candidate.gradient_accumulation_steps, how.site
        self._wanted_passes = how.passes_once + how.passes * accumulation
        batch = candidate.per_device_train_batch_size
        self._wanted_rows = site.factor * site.calls * batch * accumulation if site is not None else 0
        self._must_match_passes = "accumulation" in interface.searched or not self._wanted_rows
        """Whether a step must have exactly the requested backward passes; else its samples alone are compared."""
        self._may_skip = candidate.arm.precision == "fp16"
        self._optimizers: list[Any] = []
        self._has_begun = False
        self._whole_steps = self._passes = self._rows = 0
        self.deviations = 0
        """Number of steps in a row that differed from the requested ones."""
        self.deviation = ""
        """How the last of these steps differed, in words."""
        self._loading = LoaderWait()
        self._models = ModelNames()
        # Not at the first call of a model: the checks that this turns on would begin in the middle of the call.
        timer.begin()

    def call_begins(self, *, trains: bool) -> None:
        """Start the clock at the first call that computes gradients."""
        if trains:
            self._begin()

    def call_ends(self, called: Any, shapes: ShapesByPlace, *, trains: bool) -> None:
        """Count the rows that entered the model in a call that computes gradients."""
        if trains and self._how.site is not None:
            self._rows += self._how.site.rows(self._models.name(called), shapes)

    def _begin(self) -> None:
        """Start the clock of the first step, once."""
        if not self._has_begun:
            self._has_begun = True
            self._on_begin()
            self._loading.take()
            self._timer.start_clock()
            self._timer.step_begins()

    def backward_begins(self, tensors: Any) -> None:
        """Record the loss, and discard the marks of optimizers that stepped before this backward pass."""
        self._begin()
        self._marks = None
        super().backward_begins(tensors)

    def backward_ends(self) -> None:
        """Count the pass. Report the end of a micro-step but the last; refuse too many passes without a step."""
        self._passes += 1
        passes = self._passes - self._how.passes_once
        if passes > 0 and passes % self._how.passes == 0 and self._passes < self._wanted_passes:
            self._timer.micro_step_ends()
        # A step whose samples alone count may have a pass for each row.
        expected = self._wanted_passes if self._must_match_passes else max(self._wanted_passes, self._wanted_rows)
        if self._passes > _MOST_LATER_DEVIATIONS * expected:
            self._refuse(f"{self._name} made {self._passes} backward passes without a step of its optimizer")

    def optimizer_ends(self, optimizer: Any) -> None:
        """Mark the end of the update. The step ends with the last optimizer of its cycle, the anchor."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        mark = self._timer.mark()
        # Where the optimizer's closure made the backward pass, the times of pass and update cannot be told apart.
        passes_end = mark if self._marks is None else self._marks[0]
        self._marks = passes_end, mark
        if self._has_begun and self._optimizers.index(optimizer) == self._how.anchor:
            self._end_step()

    def _end_step(self) -> None:
        """Report a step with the requested passes and samples, drop any other, and refuse too many others."""
        assert self._marks is not None
        marks, passes, rows = self._marks, self._passes, self._rows
        self._marks = None
        self._passes = self._rows = 0
        wait_seconds = self._loading.take()
        if rows == self._wanted_rows and (passes == self._wanted_passes or not self._must_match_passes):
            self._on_step()
            self._whole_steps += 1
            self.deviations = 0
            self._timer.step_ends(marks, wait_seconds)
        else:
            # A gradient scaler may leave steps out, whose backward passes then come with those of the next.
            has_skipped_steps = passes > self._wanted_passes and passes % self._wanted_passes == 0
            if not (self._may_skip and has_skipped_steps):
                self.deviations += 1
                self.deviation = self._describe_deviation(passes, rows)
                if self.deviations > (_MOST_LATER_DEVIATIONS if self._whole_steps else _MOST_DEVIATIONS):
                    self._refuse(self.deviation)
            self._timer.step_is_dropped()
        self._timer.step_begins()

    def _describe_deviation(self, passes: int, rows: int) -> str:
        """Return in words how the script's steps differ from the requested ones."""
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
    """Set the environment variables ``named`` on a command line to their filled ``values``; remove unfilled ones."""
    for name, text in named:
        if name in values:
            os.environ[name] = values[name]
        elif placeholders_in(text):
            os.environ.pop(name, None)


class ModelNames:
    """Names the outermost models in the order of their first calls that compute gradients: ``GPT#0``.

    Calls without gradients come in an order that may vary, such as those of a policy that explores.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def name(self, module: Any) -> str:
        """Return the name of a module."""
        if id(module) not in self._names:
            self._names[id(module)] = f"{type(unwrapped(module)).__name__}#{len(self._names)}"
        return self._names[id(module)]


def unwrapped(module: Any) -> Any:
    """Return the user's module inside the wrapper of ``torch.compile``, Fabric or DDP."""
    for name in ("_orig_mod", "_original_module", "module"):
        inner = getattr(module, name, None)
        if isinstance(inner, torch.nn.Module) and type(module).__module__.startswith(("torch.", "lightning")):
            return unwrapped(inner)
    return module


class LoaderWait:
    """Records how long the process waits for batches of data loaders, and which loader gave the last batch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.latest: Any = None
        """The iterator over the loader of the last batch."""
        around_batches(self._next_batch)

    def _next_batch(self, load: Callable[[Any], Any], iterator: Any, _: Any) -> Any:
        """Return the next batch of a loader's iterator, ``load(iterator)``, and record the wait and the iterator."""
        asked_at = time.perf_counter()
        batch = load(iterator)
        self.seconds += time.perf_counter() - asked_at
        self.latest = iterator
        return batch

    def take(self) -> float:
        """Return the seconds spent waiting for batches since the last call, and reset them."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


# Most calls recorded between two steps: a model may be called for each sample. A choice.
_MOST_CALLS = 4096
# Optimizers that a script makes and never steps are waited for until others have stepped so often: WGAN's critic
# steps five times before its generator does.
_MOST_STEPS = 12
# So many backward passes before the first step of an optimizer are no accumulation. A choice.
_MOST_PASSES = 4096


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """The record of one run of a script up to its second step."""

    values: Candidate = field(default_factory=lambda: Candidate(Arm(), 1))
    """The values that its placeholders were filled with, unless it ran with its own defaults."""
    facts: ModelFacts | None = None
    calls: tuple[tuple[str, ShapesByPlace], ...] = ()
    """The calls of outermost models that compute gradients, in the last whole step."""
    cycle: tuple[tuple[int, int], ...] = ()
    """The steps of optimizers in a whole step: which one, after how many backward passes."""
    anchor: int = 0
    """The optimizer whose step ends a whole step."""
    autocast: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Dtypes of what models kept for the backward pass: those that they compute in, whoever casts."""
    checkpoints: bool = False
    computes_in_tf32: bool = False
    loader_workers: int = 0
    loader_prefetch: int | None = None
    loader_batch: int | None = None
    """Batch size of the loader used last; ``None`` where it has none."""
    loader_samples: int | None = None
    """Samples in an epoch of that loader; ``None`` where this is unknown."""
    compiles: bool = False
    """Whether it calls ``torch.compile``, which does nothing in these runs."""
    problem: Problem | None = None
    is_rejected: bool = False
    """Whether the problem is an error by which scripts reject a value: ``AssertionError`` or ``ValueError``."""

    @property
    def passes(self) -> int:
        """Number of backward passes in a whole step."""
        return sum(passes for _, passes in self.cycle)

    @property
    def weights_dtype(self) -> str:
        """The dtype of most weights."""
        return self.facts.dtype if self.facts is not None else "float32"

    @property
    def precision(self) -> Precision:
        """The precision of the run; 16-bit weights count without an autocast."""
        if self._casts_to("bfloat16"):
            return "bf16"
        if self._casts_to("float16"):
            return "fp16"
        return "tf32" if self.computes_in_tf32 else "fp32"

    def computes_in(self, precision: Precision) -> bool:
        """Return whether the run computed in this precision. For fp32 and tf32, either one will do."""
        wanted = HALF.get(precision)
        if wanted is not None:
            return self._casts_to(wanted) or self.weights_dtype == wanted
        return self.precision in ("fp32", "tf32") and self.weights_dtype == "float32"

    def _casts_to(self, dtype: str) -> bool:
        """Return whether the run computed in a dtype by casts, of autocast or by hand, as FSDP2 and Keras cast."""
        return dtype in self.autocast or (self.weights_dtype == "float32" and dtype in self.kept)

    def describe_numerics(self) -> str:
        """Return the precision of the run in words."""
        casts = f"autocast to {' and '.join(self.autocast)}" if self.autocast else "no autocast"
        return f"{casts}, {self.weights_dtype} weights, and kept {' and '.join(self.kept) or 'nothing'} between layers"


class ScriptWatch(Listener):
    """Records model calls, backward passes and updates of a script, and ends the process with its second whole step."""

    def __init__(
        self,
        source: TrainingSource,
        finish: Callable[[ScriptRun], NoReturn],
        fail: Callable[[BaseException], NoReturn],
        *,
        to_first_call: bool,
    ) -> None:
        self._to_first_call = to_first_call
        self._source = source
        self._finish = finish
        self._fail = fail
        self._made_optimizers: list[Any] = []
        self._stepped_optimizers: list[Any] = []
        self._intervals: list[_UpdateInterval] = []
        self._interval = _UpdateInterval()
        self._is_stepping = False
        self._models = ModelNames()
        self._watch = TrainingWatch()
        self._watch.watch_checkpoints()
        self._watch.watch_updates_by_hand()
        self._loading = LoaderWait()
        after(torch.optim.Optimizer, "__init__", lambda _, made, *__, **___: self._made_optimizers.append(made))
        self._watch.listener = self
        self._watch.install()

    def call_ends(self, called: Any, shapes: ShapesByPlace, *, trains: bool) -> None:
        """Record the inputs of a call that computes gradients; end the run there if asked to."""
        if not trains:
            return
        name = self._models.name(called)
        self._interval.model = called if self._interval.model is None else self._interval.model
        if len(self._interval.calls) < _MOST_CALLS:
            self._interval.calls.append((name, shapes))
        if self._to_first_call and shapes:
            self._finish(ScriptRun(calls=((name, shapes),)))

    def backward_ends(self) -> None:
        """Count the pass. End the run with an error after too many passes without an optimizer step."""
        self._interval.passes += 1
        self._interval.passes_within += self._is_stepping
        if self._passes_without_step > _MOST_PASSES:
            self._fail(self._not_stepped())

    @property
    def _passes_without_step(self) -> int:
        """Backward passes before the first step of an optimizer; 0 after it."""
        return 0 if self._intervals else self._interval.passes

    def _not_stepped(self) -> UserCodeError:
        """Return the error for backward passes without an optimizer step."""
        return UserCodeError(
            f"{self._source.name} made {self._passes_without_step} backward passes, and no optimizer of torch stepped",
            "have it update by a torch.optim.Optimizer, or call model.zero_grad() after each update: that ends a step",
        )

    def error_at_end(self) -> UserCodeError:
        """Return the error for a script that ended before its second whole step."""
        if self._passes_without_step:
            return self._not_stepped()
        if not self._made_optimizers:
            return UserCodeError(
                f"{self._source.name} ended without having made an optimizer of torch",
                "name the script that trains with torch, with the options with which it does",
            )
        return UserCodeError(
            f"{self._source.name} ended before the second step of its optimizer",
            "give it the options with which it trains, and for more steps",
        )

    def optimizer_begins(self, optimizer: Any) -> None:
        self._is_stepping = True

    def optimizer_ends(self, optimizer: Any) -> None:
        """Record the step. End the run once every optimizer that steps has done so twice, or with an error."""
        if optimizer not in self._stepped_optimizers:
            self._stepped_optimizers.append(optimizer)
        self._is_stepping = False
        if (problem := self._interval.problem(optimizer, self._source.name)) is not None:
            self._fail(problem)
        self._interval.optimizer = self._stepped_optimizers.index(optimizer)
        self._intervals.append(self._interval)
        self._interval = _UpdateInterval()
        counts = Counter(interval.optimizer for interval in self._intervals)
        waits = len(self._made_optimizers) > len(self._stepped_optimizers) and max(counts.values()) < _MOST_STEPS
        if min(counts.values()) >= 2 and not waits:
            try:
                check_gradients(self._watch, self._source)
                run = self._last_whole_step(counts)
            except BaseException as error:
                self._fail(error)
            self._finish(run)
        # What was called before the first step may have been to build a model, or to look at it.
        self._watch.restart_dtype_record()

    def _last_whole_step(self, step_counts: Counter[int]) -> ScriptRun:
        """Return the record of the last whole step, from the number of steps of each optimizer.

        It goes from one step of the anchor to the next: of the optimizers that step least often, the last.
        """
        least = min(step_counts.values())
        rare = {optimizer for optimizer, count in step_counts.items() if count == least}
        anchor = next(interval.optimizer for interval in reversed(self._intervals) if interval.optimizer in rare)
        ends = [at for at, interval in enumerate(self._intervals) if interval.optimizer == anchor]
        whole = self._intervals[ends[-2] + 1 : ends[-1] + 1]
        models = [interval.model for interval in whole if interval.model is not None]
        loading = self._loading.latest
        # A ``BatchSampler``, unless the script has one of its own.
        batches = getattr(loading, "_index_sampler", None)
        return ScriptRun(
            facts=facts_of(unwrapped(models[0]) if models else None, None),
            calls=tuple(call for interval in whole for call in interval.calls),
            cycle=tuple((interval.optimizer, interval.passes) for interval in whole),
            anchor=anchor,
            autocast=tuple(sorted({dtype for _, dtype in self._watch.autocasts})),
            kept=tuple(sorted(self._watch.inner_dtypes.intersection(DTYPES))),
            checkpoints=self._watch.checkpoints,
            computes_in_tf32=torch.get_float32_matmul_precision() != "highest" and torch.cuda.is_available(),
            loader_workers=getattr(loading, "_num_workers", 0),
            loader_prefetch=getattr(loading, "_prefetch_factor", None),
            loader_batch=getattr(batches, "batch_size", None),
            loader_samples=length(getattr(batches, "sampler", None)),
            compiles=self._watch.compiles,
        )


@dataclass
class _UpdateInterval:
    """The model calls and backward passes between two steps of optimizers."""

    optimizer: int = 0
    """The one that stepped at the end."""
    passes: int = 0
    passes_within: int = 0
    """The backward passes made within the optimizer's step, as by its closure."""
    calls: list[tuple[str, ShapesByPlace]] = field(default_factory=list)
    model: Any = None
    """The first outermost model that was called to compute gradients."""

    def problem(self, optimizer: Any, name: str) -> UserCodeError | None:
        """Return the error of a step with several passes within it, or of gradients without a pass; else ``None``."""
        if self.passes_within > 1:
            return UserCodeError(
                f"{type(optimizer).__name__} of {name} makes {self.passes_within} backward passes in each of its "
                "steps, so that batch and speed say little of its training",
                "search with an optimizer that makes one step of each backward pass",
            )
        has_gradients = any(weight.grad is not None for group in optimizer.param_groups for weight in group["params"])
        if self.passes == 0 and self.calls and has_gradients:
            return UserCodeError(
                f"{name} computes its gradients without a backward pass, as torch.autograd.grad does",
                "have it call loss.backward(): backward passes are what micro-steps are counted by",
            )
        return None
