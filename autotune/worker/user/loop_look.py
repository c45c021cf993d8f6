"""Look at the first optimizer step of a training loop of the user's own, whatever it is written with.

Nothing of the loop is known but what torch tells: outermost calls of modules, the tensors that backward passes begin
from, and the first step of an optimizer after one.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotune.core.code_interface import HowItSteps
from autotune.core.jobs import TrialWork
from autotune.core.look import FirstStep, LookAnswer, LookWork
from autotune.core.outcome import Effort, Failed, Outcome, OutOfMemory
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.worker.arrays import arrays_in
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial.look import calm, in_full_float32, step_of
from autotune.worker.trial.step_checks import StepChecks
from autotune.worker.user.own_trial import OwnTrial
from autotune.worker.wrapping import around


class _FirstStep:
    """Sees a training up to its first update."""

    def __init__(self, samples: int, finish: Callable[[FirstStep], NoReturn]) -> None:
        self._samples, self._finish = samples, finish
        self._depth = self._passes = 0
        self._loss = self._batch = 0.0
        self._models: dict[int, torch.nn.Module] = {}

    def install(self) -> None:
        """Watch this process from now on."""
        modules.register_module_forward_pre_hook(self._begin_call)
        modules.register_module_forward_hook(self._end_call, with_kwargs=True, always_call=True)
        around(torch.autograd, "backward", self._pass_back)
        register_optimizer_step_pre_hook(self._update)

    def _begin_call(self, called: torch.nn.Module, _: Any) -> None:
        if self._depth == 0 and id(called) not in self._models and next(called.parameters(), None) is not None:
            # Kept, so that no other gets its id.
            self._models[id(called)] = called
            calm(called)
        self._depth += 1

    def _end_call(self, called: Any, given: Any, named: Any, _: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and torch.is_grad_enabled() and id(called) in self._models:
            arrays = (array for array in arrays_in((given, named)) if isinstance(array, torch.Tensor))
            self._batch += sum(float(array.detach().double().sum()) for array in arrays)

    def _pass_back(self, backward: Callable[..., Any], *words: Any, **options: Any) -> Any:
        tensors = words[0] if words else options.get("tensors")
        each = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ())
        self._loss += sum(float(tensor.detach().double().sum()) for tensor in each)
        self._passes += 1
        return backward(*words, **options)

    def _update(self, *_: Any) -> None:
        named = itertools.chain.from_iterable(
            ((f"{at}.{name}", each) for name, each in model.named_parameters())
            for at, model in enumerate(self._models.values())
        )
        if self._passes:
            self._finish(step_of(named, self._loss, self._samples, self._passes, batch=self._batch))


def look_at_loop(
    workload: Workload,
    work: LookWork,
    scratch: Scratch,
    finish: Callable[[LookAnswer], NoReturn],
    ranks: Ranks,
) -> NoReturn:
    """Run the user's loop up to its first update, as a trial would; the process ends with ``finish``."""
    (candidate,) = work.candidates

    # What is computed is the same without a compiler, which would take its time.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # A script with placeholders may make several backward passes of each micro-step.
    how = workload.source.interface.steps if workload.source is not None else HowItSteps()

    def take(step: FirstStep) -> NoReturn:
        asked = how.passes_once + how.passes * candidate.gradient_accumulation_steps
        if step.micro_steps != asked:
            finish(LookAnswer(problem=f"its first update comes after {step.micro_steps} backward passes, not {asked}"))
        dtypes = {dtype for _, dtype in looking.watch.autocasts} | looking.watch.inner_dtypes
        computed = [torch.finfo(found).eps / 2 for name in dtypes if (found := getattr(torch, name)).is_floating_point]
        finish(LookAnswer((dataclasses.replace(step, roundoff=max([step.roundoff, *computed])),)))

    def end(outcome: Outcome) -> NoReturn:
        why = outcome.message if isinstance(outcome, Failed | OutOfMemory) else "it made no update"
        finish(LookAnswer(problem=why))

    class Looking(OwnTrial):
        """The trial, which ends at its first update."""

        def _make_checks(self) -> StepChecks:
            in_full_float32()
            _FirstStep(candidate.samples_per_step, take).install()
            return super()._make_checks()

    effort = Effort(max_micro_steps=candidate.gradient_accumulation_steps)
    trial = TrialWork(candidate, work.devices, work.cap_bytes, effort, work.seed)
    looking = Looking(workload, trial, scratch, lambda _: None, end, ranks)
    looking.run_and_end()
