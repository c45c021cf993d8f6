"""Watch a run of a script up to its second whole step: what goes into which model, and what its optimizers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from autotune.core.candidate import Precision
from autotune.core.inspection import ModelFacts
from autotune.core.messages import Problem
from autotune.core.training_source import TrainingSource
from autotune.core.workload import DTYPES
from autotune.space.precision_names import HALF
from autotune.worker.trial.listener import Listener, ShapesByPlace
from autotune.worker.trial.training_watch import TrainingWatch
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.inspection import check_gradients, facts_of, length
from autotune.worker.user.placeholder_steps import Loading, ModelNames, unwrapped
from autotune.worker.wrapping import after

# Of a model that is called for each sample. A choice.
_MOST_CALLS = 4096
# Optimizers that a script makes and never steps are waited for until others have stepped so often: WGAN's critic
# steps five times before its generator does.
_MOST_STEPS = 12
# So many backward passes before the first step of an optimizer are no accumulation. A choice.
_MOST_PASSES = 4096


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What one run of a script showed up to its second step."""

    facts: ModelFacts | None = None
    calls: tuple[tuple[str, ShapesByPlace], ...] = ()
    """The calls of outermost models that compute gradients, in the last whole step."""
    cycle: tuple[tuple[int, int], ...] = ()
    """The steps of optimizers in a whole step: which one, after how many backward passes."""
    anchor: int = 0
    autocast: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Dtypes of what models kept for the backward pass: those that they compute in, whoever casts."""
    checkpoints: bool = False
    computes_in_tf32: bool = False
    loader_workers: int = 0
    loader_prefetch: int | None = None
    loader_batch: int | None = None
    """Of the loader that was at work last; ``None`` where it does not say."""
    loader_samples: int | None = None
    """Those of an epoch of it."""
    compiles: bool = False
    """Whether it calls ``torch.compile``, which does nothing in these runs."""
    problem: Problem | None = None
    is_rejected: bool = False
    """Whether that is an error by which scripts reject a value."""

    @property
    def passes(self) -> int:
        """Backward passes of a whole step."""
        return sum(passes for _, passes in self.cycle)

    @property
    def weights_dtype(self) -> str:
        """The dtype of most weights."""
        return self.facts.dtype if self.facts is not None else "float32"

    @property
    def precision(self) -> Precision:
        """The precision that the run computed in; weights of 16 bits are computed in without an autocast."""
        for name, dtype in HALF.items():
            if self._casts_to(dtype):
                return "bf16" if name == "bf16" else "fp16"
        return "tf32" if self.computes_in_tf32 else "fp32"

    def computes_in(self, precision: Precision) -> bool:
        """Return whether it did what a precision says."""
        wanted = HALF.get(precision)
        if wanted is not None:
            return self._casts_to(wanted) or self.weights_dtype == wanted
        return self.precision in ("fp32", "tf32") and self.weights_dtype == "float32"

    def _casts_to(self, dtype: str) -> bool:
        # Not each cast is an autocast: FSDP2 and Keras cast the weights of each layer.
        return dtype in self.autocast or (self.weights_dtype == "float32" and dtype in self.kept)

    def describe_numerics(self) -> str:
        """Return what it computed in, in words."""
        casts = f"autocast to {' and '.join(self.autocast)}" if self.autocast else "no autocast"
        return f"{casts}, {self.weights_dtype} weights, and kept {' and '.join(self.kept) or 'nothing'} between layers"


class ScriptWatch(Listener):
    """What a run of a script shows; ends the process with its second whole step."""

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
        self._made: list[Any] = []
        self._optimizers: list[Any] = []
        self._steps: list[_UpdateInterval] = []
        self._now = _UpdateInterval()
        self._is_stepping = False
        self._models = ModelNames()
        self._watch = TrainingWatch()
        self._watch.watch_checkpoints()
        self._watch.watch_updates_by_hand()
        self._loading = Loading()
        after(torch.optim.Optimizer, "__init__", lambda _, optimizer, *__, **___: self._made.append(optimizer))
        self._watch.listener = self
        self._watch.install()

    def call_ends(self, called: Any, shapes: ShapesByPlace, *, trains: bool) -> None:
        """Take down what went in."""
        if not trains:
            return
        name = self._models.name(called)
        self._now.model = called if self._now.model is None else self._now.model
        if len(self._now.calls) < _MOST_CALLS:
            self._now.calls.append((name, shapes))
        if self._to_first_call and shapes:
            self._finish(ScriptRun(calls=((name, shapes),)))

    def backward_ends(self) -> None:
        """Count the pass."""
        self._now.passes += 1
        self._now.passes_within += self._is_stepping
        if self.passes_without_step > _MOST_PASSES:
            self._fail(self.not_stepped())

    @property
    def passes_without_step(self) -> int:
        """Backward passes before the first step of an optimizer; 0 after it."""
        return 0 if self._steps else self._now.passes

    def not_stepped(self) -> UserCodeError:
        """Return what is wrong where there are only such passes."""
        return UserCodeError(
            f"{self._source.name} made {self.passes_without_step} backward passes, and no optimizer of torch stepped",
            "have it update by a torch.optim.Optimizer, or call model.zero_grad() after each update: that ends a step",
        )

    def ended_early(self) -> UserCodeError:
        """Return what is wrong where the script has ended."""
        if not self._made:
            return UserCodeError(
                f"{self._source.name} ended without having made an optimizer of torch",
                "name the script that trains with torch, with the options with which it does",
            )
        return UserCodeError(
            f"{self._source.name} ended before the second step of its optimizer",
            "give it the options with which it trains, and for more steps",
        )

    def optimizer_begins(self, optimizer: Any) -> None:
        """Note that what follows is within the step."""
        self._is_stepping = True

    def optimizer_ends(self, optimizer: Any) -> None:
        """Record the step, and end the run after two of every optimizer."""
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        self._is_stepping = False
        if (problem := self._now.problem(optimizer, self._source.name)) is not None:
            self._fail(problem)
        self._now.optimizer = next(at for at, each in enumerate(self._optimizers) if each is optimizer)
        self._steps.append(self._now)
        self._now = _UpdateInterval()
        counts = Counter(step.optimizer for step in self._steps)
        waits = len(self._made) > len(self._optimizers) and max(counts.values()) < _MOST_STEPS
        if min(counts.values()) >= 2 and not waits:
            try:
                check_gradients(self._watch, self._source)
                seen = self._seen(counts)
            except BaseException as error:
                self._fail(error)
            self._finish(seen)
        # What was called before the first step may have been to build a model, or to look at it.
        self._watch.look_within_anew()

    def _seen(self, counts: Counter[int]) -> ScriptRun:
        least = min(counts.values())
        rare = {optimizer for optimizer, count in counts.items() if count == least}
        anchor = next(step.optimizer for step in reversed(self._steps) if step.optimizer in rare)
        ends = [at for at, step in enumerate(self._steps) if step.optimizer == anchor]
        whole = self._steps[ends[-2] + 1 : ends[-1] + 1]
        return ScriptRun(
            facts_of(unwrapped(next((step.model for step in whole if step.model is not None), None)), None),
            tuple(call for step in whole for call in step.calls),
            tuple((step.optimizer, step.passes) for step in whole),
            anchor,
            tuple(sorted({dtype for _, dtype in self._watch.autocasts})),
            tuple(sorted(self._watch.inner_dtypes.intersection(DTYPES))),
            self._watch.checkpoints,
            torch.get_float32_matmul_precision() != "highest" and torch.cuda.is_available(),
            self._loading.workers,
            self._loading.prefetch,
            getattr(self._loading.batches, "batch_size", None),
            length(getattr(self._loading.batches, "sampler", None)),
            self._watch.compiles,
        )


@dataclass
class _UpdateInterval:
    """What was seen between two steps of optimizers."""

    optimizer: int = 0
    """The one that stepped at the end."""
    passes: int = 0
    passes_within: int = 0
    """Those of them that the optimizer's own step made."""
    calls: list[tuple[str, ShapesByPlace]] = field(default_factory=list)
    model: Any = None
    """The first outermost one that was called to compute gradients."""

    def problem(self, optimizer: Any, name: str) -> UserCodeError | None:
        """Say why its samples cannot be told; ``None`` where they can."""
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
