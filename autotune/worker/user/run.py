"""Run a trial, a look (at the first step), a rehearsal or an inspection of the user's code, by its kind of training.

Of a loop nothing is known but what torch tells: outermost calls of modules, the tensors that backward passes begin
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

from autotune.core.candidate import Document
from autotune.core.inspection import Inspection
from autotune.core.look import FirstStep, LookAnswer, LookWork
from autotune.core.messages import InspectionWork, Problem, TrialWork
from autotune.core.outcome import Completed, Effort, Failed, OutOfMemory, outcome_document
from autotune.core.rehearsal import RehearsalWork
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.space.arms import applied_settings
from autotune.worker.arrays import arrays_in
from autotune.worker.process import leave
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial.look import in_full_float32, prepare_look, step_of, turn_off_dropout
from autotune.worker.trial.step_checks import StepChecks
from autotune.worker.user import placeholder_inspection, trainer_inspection
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.inspection import Code, inspect_loop
from autotune.worker.user.loop_rehearsal import LoopRehearsal
from autotune.worker.user.own_trial import OwnTrial
from autotune.worker.user.rehearsal import TrainerRehearsal
from autotune.worker.user.trainer_fields import generates
from autotune.worker.user.trainer_trial import TrainerTrial
from autotune.worker.wrapping import around


class Look(OwnTrial):
    """A trial that ends with its first step and reports its loss and gradients, by which trainings are compared."""

    def __init__(self, workload: Workload, look: LookWork, *args: Any) -> None:
        """Set up a trial of the one candidate of ``look`` that runs all micro-steps."""
        (candidate,) = look.candidates
        effort = Effort(max_micro_steps=candidate.gradient_accumulation_steps)
        trial = TrialWork(candidate, look.devices, look.cap_bytes, effort, look.seed, look.unmodified)
        super().__init__(workload, trial, *args)
        self._look = look

    def _end(self, outcome: Completed | OutOfMemory | Failed) -> NoReturn:
        """End the process with the reason why no first step was seen."""
        why = outcome.message if isinstance(outcome, Failed | OutOfMemory) else "it made no update"
        self._finish(Problem(why))


class TrainerLook(Look, TrainerTrial):
    """A look at the first step of the user's own ``Trainer``."""

    @property
    def _wanted(self) -> Document:
        """The fields of ``TrainingArguments`` to set, for a user's own settings batch and float32."""
        if not self._is_unmodified:
            return super()._wanted
        return {
            "per_device_train_batch_size": self._candidate.per_device_train_batch_size,
            "gradient_accumulation_steps": self._candidate.gradient_accumulation_steps,
            "bf16": False,
            "fp16": False,
            "torch_compile": False,
            "torch_compile_backend": None,
            "torch_compile_mode": None,
        }

    def _check(self, trainer: Any) -> None:
        """Raise an error where the training generates its samples (``UserCodeError``), or sees several GPUs."""
        if generates(trainer.args):
            raise UserCodeError("what it trains on is generated anew in each run")
        if trainer.args.n_gpu > 1:
            raise RuntimeError(f"{trainer.args.n_gpu} GPUs are visible; exactly one was expected")

    def _prepare(self, trainer: Any) -> None:
        """Set up a ``Trainer`` to end the process with its first step. Does not train yet."""
        in_full_float32()
        prepare_look(
            trainer,
            self._candidate.samples_per_step,
            None if self._is_unmodified else applied_settings(self._candidate.arm),
            lambda step: self._finish(LookAnswer((step,))),
            seed=self._look.seed,
            step_seed=self._look.seed + self._look.noise,
            most_float32_bytes=self._look.cap_bytes // 2,
        )


class LoopLook(Look):
    """A look at the first update of a loop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The step computes the same without a compiler, which would take time.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"

    def _make_checks(self) -> StepChecks:
        """Watch for the first update, in full float32; return the checks of a trial."""
        in_full_float32()
        _FirstStep(self._candidate.samples_per_step, self._report)
        return super()._make_checks()

    def _report(self, step: FirstStep) -> NoReturn:
        """Report the first step, with the largest roundoff of the dtypes seen, or a problem with its passes."""
        # A script with placeholders may make several backward passes of each micro-step.
        how = self._source.interface.steps
        asked = how.passes_once + how.passes * self._candidate.gradient_accumulation_steps
        if step.micro_steps != asked:
            self._finish(Problem(f"its first update comes after {step.micro_steps} backward passes, not {asked}"))
        names = {dtype for _, dtype in self._checks.watch.autocasts} | self._checks.watch.inner_dtypes
        roundoffs = [torch.finfo(dtype).eps / 2 for name in names if (dtype := getattr(torch, name)).is_floating_point]
        self._finish(LookAnswer((dataclasses.replace(step, roundoff=max([step.roundoff, *roundoffs])),)))


class _FirstStep:
    """Sums losses and inputs of a training from now on up to its first update; there ``finish`` ends the process."""

    def __init__(self, samples: int, finish: Callable[[FirstStep], NoReturn]) -> None:
        self._samples, self._finish = samples, finish
        self._call_depth = self._passes = 0
        self._loss_sum = self._input_sum = 0.0
        self._models: dict[int, torch.nn.Module] = {}
        """The outermost models so far, by their ids."""
        modules.register_module_forward_pre_hook(self._begin_call)
        modules.register_module_forward_hook(self._end_call, with_kwargs=True, always_call=True)
        around(torch.autograd, "backward", self._backward)
        register_optimizer_step_pre_hook(self._update)

    def _begin_call(self, called: torch.nn.Module, _: Any) -> None:
        """Turn off dropout in a model at its first call."""
        if self._call_depth == 0 and id(called) not in self._models and next(called.parameters(), None) is not None:
            # Since it is kept, no other object gets the same id.
            self._models[id(called)] = called
            turn_off_dropout(called)
        self._call_depth += 1

    def _end_call(self, called: Any, given: Any, named: Any, _: Any) -> None:
        """Add the inputs of an outermost model call to the sum that identifies the batch."""
        self._call_depth -= 1
        if self._call_depth == 0 and torch.is_grad_enabled() and id(called) in self._models:
            arrays = (array for array in arrays_in((given, named)) if isinstance(array, torch.Tensor))
            self._input_sum += sum(float(array.detach().double().sum()) for array in arrays)

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count a backward pass, and add its loss."""
        tensors = args[0] if args else kwargs.get("tensors")
        self._loss_sum += sum(float(tensor.detach().double().sum()) for tensor in arrays_in(tensors))
        self._passes += 1
        return backward(*args, **kwargs)

    def _update(self, *_: Any) -> None:
        """Report the first step before its update. Ignore updates before any backward pass."""
        parameters = itertools.chain.from_iterable(
            ((f"{number}.{name}", parameter) for name, parameter in model.named_parameters())
            for number, model in enumerate(self._models.values())
        )
        if self._passes:
            self._finish(step_of(parameters, self._loss_sum, self._samples, self._passes, input_sum=self._input_sum))


def run_own(
    workload: Workload,
    work: TrialWork | LookWork | RehearsalWork | InspectionWork,
    scratch: Scratch,
    send: Callable[[Any], None],
    ranks: Ranks,
) -> NoReturn:
    """Run a trial, look, rehearsal or inspection of the user's own code, send its result, and end the process."""
    source = workload.source
    assert source is not None

    def finish(answer: Any) -> NoReturn:
        send(outcome_document(answer) if isinstance(work, TrialWork) else answer)
        leave(0)

    def finish_inspection(answer: Inspection | Problem) -> NoReturn:
        if isinstance(answer, Inspection):
            # No rank ends while another still waits for it.
            ranks.gather(True)
        finish(answer)

    is_trainer = source.framework == "trainer"
    match work:
        case RehearsalWork():
            rehearsal = TrainerRehearsal if is_trainer else LoopRehearsal
            rehearsal(workload, work, scratch, lambda _: None, finish, ranks).run_and_end()
        case LookWork():
            look = TrainerLook if is_trainer else LoopLook
            look(workload, work, scratch, lambda _: None, finish, ranks).run_and_end()
        case TrialWork():
            trial = TrainerTrial if is_trainer else OwnTrial
            trial(workload, work, scratch, send, finish, ranks).run_and_end()
    # All of these end the process: the work is an inspection.
    code = Code(source, work, scratch)
    if source.kind == "loop":
        inspect_loop(code, finish_inspection)
    elif source.template.names:
        placeholder_inspection.inspect(code, finish_inspection)
    else:
        trainer_inspection.inspect(code, finish_inspection, ranks)
