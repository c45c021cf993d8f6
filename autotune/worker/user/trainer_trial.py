"""Run trials of the user's own Trainer or script, and stop within ``Trainer.train`` once measured.

We raise no exception in user code, because it might catch it. The callback sends the result and ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import Trainer

from autotune.core.candidate import Candidate, Document, Precision
from autotune.core.inspection import Inspection, InspectionAnswer, ModelFacts, OwnSettings
from autotune.core.jobs import InspectionWork
from autotune.core.messages import Progress
from autotune.core.outcome import Completed, Effort, Failed, Measurement
from autotune.core.placement import RankDevices
from autotune.core.scratch import Scratch, remove_made
from autotune.core.training_source import TrainingSource
from autotune.space.training_arguments import checkpointing_field, training_arguments
from autotune.worker.facts import inspect_environment, layer_classes
from autotune.worker.private.accelerate import has_fsdp2
from autotune.worker.private.transformers import attention_of, is_reporting, mean_train_loss
from autotune.worker.process import Beside, in_fork
from autotune.worker.trial.losses import LossWatch
from autotune.worker.trial.measure import MeasureCallback, micro_steps_to_run
from autotune.worker.trial.rehearsal import Rehearsing
from autotune.worker.user.accelerate_trial import AccelerateInspection
from autotune.worker.user.code import UserCodeError, enter, load_function, run_script
from autotune.worker.user.fake_steps import Memory, TrainerStep, add_memory, leave_large_weights_unset, with_memory
from autotune.worker.user.guard import Guard
from autotune.worker.user.inspection import config_document, length, problem_of, weight_dtype
from autotune.worker.user.lightning_trial import LightningInspection
from autotune.worker.user.overlay import Overlay, known_fields, own_batch, plain, probe
from autotune.worker.user.own_trial import OwnTrial, after_what_lies_ready
from autotune.worker.user.written_files import WrittenFiles

OnTrain = Callable[[Any, Callable[[], Any]], NoReturn]

# Steps cut short by the end of an epoch are not counted, so more are allowed than are wanted.
_SPARE_STEPS = 20

# The steps are traced beside the first run. Where that takes longer, this is waited for in any case, as long as for
# predictions (autotune.tuning.forecasting): each size that does not fit costs a trial of some seconds.
_LEAST_WAIT_SECONDS = 20.0


def _intercept(on_train: OnTrain) -> None:
    """Have every ``Trainer``'s training call ``on_train`` with what would have trained, in this process from now on."""
    original = Trainer.train

    def train(trainer: Any, *_: Any, **__: Any) -> NoReturn:
        on_train(trainer, lambda: original(trainer))

    Trainer.train = train


def _run_source(source: TrainingSource, overrides: Document, output_dir: str) -> NoReturn:
    """Run the user's code up to and into its training; raises where it ends or fails before that."""
    if source.kind == "build":
        build_trainer(source, overrides).train()
        raise UserCodeError(f"the Trainer of {source.name} has a train method that never calls Trainer.train")
    try:
        run_script(source, output_dir)
    except SystemExit as left:
        if left.code not in (None, 0):
            what = f"exit code {left.code}" if isinstance(left.code, int) else f"the words {str(left.code)[:200]!r}"
            raise UserCodeError(
                f"{source.name} left with {what} before it trained",
                "run it by itself with the same options to see whether it trains",
            ) from left
    raise UserCodeError(
        f"{source.name} ended without having trained",
        "give it the options with which it trains, such as --do_train; what is measured trains with "
        "transformers.Trainer, an Accelerator or Lightning",
    )


def build_trainer(source: TrainingSource, overrides: Document) -> Any:
    """What the user's function returns; raises ``UserCodeError`` where that is no ``Trainer``."""

    def train(*_: Any, **__: Any) -> NoReturn:
        raise UserCodeError(f"{source.name} calls train itself", "have it return the Trainer untrained")

    intercepted, Trainer.train = Trainer.train, train
    try:
        trainer = load_function(source)(dict(overrides))
    finally:
        Trainer.train = intercepted
    if not isinstance(trainer, Trainer):
        kind = "the class" if isinstance(trainer, type) else "an object of type"
        name = trainer.__name__ if isinstance(trainer, type) else type(trainer).__name__
        if name == "Trainer":
            name = f"{trainer.__module__}.{name}"
        raise UserCodeError(
            f"{source.name} returned {'None' if trainer is None else f'{kind} {name}'}, not a transformers.Trainer",
            "return the Trainer, ready to train",
        )
    return trainer


class _WholeStepsCallback(MeasureCallback):
    """Measures steps that are whole, and has nothing logged, evaluated or saved beside them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look whether the data can make a whole step."""
        loader = kwargs.get("train_dataloader")
        samples, batch = length(getattr(loader, "dataset", None)), args.train_batch_size
        needed = batch * args.gradient_accumulation_steps * args.world_size
        if samples is not None and samples < needed:
            raise UserCodeError(f"its training data has {samples} samples, too few for a step of {needed}")
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the step down, unless the end of the data cut it short."""
        if self._is_whole(args, state, kwargs.get("train_dataloader")):
            super().on_step_end(args, state, control)
        else:
            self.drop_step()
        _silence(control)
        # A callback of the user's own may stop a training that is only measured.
        control.should_training_stop = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing happens between epochs."""
        _silence(control)
        control.should_training_stop = False

    def _is_whole(self, args: Any, state: Any, loader: Any) -> bool:
        if self.micro_steps_seen < args.gradient_accumulation_steps:
            return False
        if abs(state.epoch - round(state.epoch)) > 1e-9:
            return True
        samples = length(getattr(loader, "dataset", None))
        return args.dataloader_drop_last or (
            samples is not None and samples % (args.train_batch_size * args.world_size) == 0
        )


def _silence(control: Any) -> None:
    control.should_log = control.should_evaluate = control.should_save = False


class TrainerTrial(OwnTrial):
    """A trial whose model, data and ``Trainer`` the user's code makes."""

    @property
    def _wanted(self) -> Document:
        """The fields to set; none where the user's own settings are measured."""
        return {} if self._is_unmodified else _fields(self._candidate, self._device_kind)

    def run_code(self, output_dir: str) -> NoReturn:
        """Run the user's code up to and into ``Trainer.train``."""
        self._overlay = Overlay(
            output_dir,
            tuned=self._wanted if self._source.kind == "script" else {},
            shortened=_shortened(self._candidate, self._effort),
            on_cpu=self._device_kind == "cpu",
        )
        self._overlay.install()
        _intercept(self._train_own)
        _run_source(self._source, self._wanted, output_dir)

    def _train_own(self, trainer: Any, train: Callable[[], Any]) -> NoReturn:
        """Stands in for ``Trainer.train``: trains, and ends the process."""
        self._guard.lift()
        try:
            self._check(trainer)
            self._prepare(trainer)
            self._phases.enter("train")
            train()
            raise UserCodeError(f"{self._source.name} stopped training before enough steps were measured")
        except BaseException as error:
            self._end_after(error)

    def _check(self, trainer: Any) -> None:
        """Raise ``UserCodeError`` where the ``Trainer`` would not train as the candidate says."""
        if trainer.args.n_gpu > 1:
            raise RuntimeError(f"{trainer.args.n_gpu} GPUs are visible to the trial; exactly one was expected")
        if trainer.args.world_size != self._ranks.count:
            raise UserCodeError(
                f"the Trainer of {self._source.name} trains on {trainer.args.world_size} ranks, not {self._ranks.count}"
            )
        if self._ranks.count > 1 and trainer.args.deepspeed:
            raise UserCodeError(
                f"the TrainingArguments of {self._source.name} set deepspeed, and several GPUs train code of your own "
                "with DDP or FSDP",
                "leave deepspeed out",
            )
        if ignored := self._overlay.ignored(trainer.args, self._wanted):
            raise UserCodeError(_ignored_message(self._source, ignored))
        if not self._is_unmodified and not self._candidate.arm.gradient_checkpointing and _checkpoints(trainer.model):
            raise UserCodeError(
                f"the model of {self._source.name} checkpoints, though gradient_checkpointing is false",
                "have it do so only where its TrainingArguments say so",
            )

    def _rehearse(self, trainer: Any) -> Rehearsing:
        """Have the steps of its training data come twice where their shapes are new."""
        rehearsing = Rehearsing(trainer.args.gradient_accumulation_steps)
        original = trainer.get_train_dataloader
        trainer.get_train_dataloader = lambda: rehearsing.over(original())
        return rehearsing

    def _prepare(self, trainer: Any) -> None:
        """Measure it for as many steps as needed, and remove its other callbacks that report."""
        assert self._meter is not None
        for callback in list(trainer.callback_handler.callbacks):
            if is_reporting(type(callback)):
                trainer.remove_callback(callback)
        rehearsing = self._rehearse(trainer) if self._device_kind == "cuda" else None
        self._hold_inputs(trainer)
        watch = LossWatch(trainer)
        if self._overlay.shortened is None:
            self._effort = dataclasses.replace(
                self._effort, max_micro_steps=self._candidate.gradient_accumulation_steps
            )
        self._effort = after_what_lies_ready(
            self._effort,
            self._candidate,
            trainer.args.dataloader_num_workers,
            trainer.args.dataloader_prefetch_factor,
        )
        self._callback = _WholeStepsCallback(
            self._meter,
            self._candidate,
            self._effort,
            on_enough=lambda measured: self._end(self._measured(measured, trainer, watch)),
            on_step=lambda step: self._send(Progress(step=step)),
            rehearsing=rehearsing,
            busy=self._busy_step(),
            ranks=self._ranks,
        )
        trainer.add_callback(self._callback)
        trainer.args.max_steps = _SPARE_STEPS * (self._effort.warmup_steps + self._effort.max_steps)
        self._meter.reset_peaks()

    def _measured(self, measured: Measurement, trainer: Any, watch: LossWatch) -> Completed | Failed:
        if (problem := watch.problem()) is not None:
            return Failed("non_finite", problem, during="train")
        return self._completed(measured, mean_train_loss(trainer))


def _checkpoints(model: Any) -> bool:
    """Whether the model recomputes activations as it is; transformers 5.18 and later deprecate the second name."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(model, name)), False))


def _fields(candidate: Candidate, device_kind: str) -> Document:
    return dict(training_arguments(candidate, known_fields(), device_kind))


def _shortened(candidate: Candidate, effort: Effort) -> tuple[int, int]:
    return candidate.gradient_accumulation_steps, micro_steps_to_run(candidate, effort)


def _ignored_message(source: TrainingSource, ignored: str) -> str:
    if source.kind == "build":
        return f"{source.name} ignored its overrides: {ignored}; pass them all on to its TrainingArguments"
    return (
        f"{source.name} changes its TrainingArguments after they were made: {ignored}; leave that to the command line"
    )


# What a process sees of the user's training before the first trial


def inspect(
    source: TrainingSource, work: InspectionWork, scratch: Scratch, finish: Callable[[InspectionAnswer], NoReturn]
) -> NoReturn:
    """Facts as ``autotune.worker.facts.inspect`` gives them, of the model that reaches ``Trainer.train``.

    A function that builds a ``Trainer`` is called twice, to see whether it uses what it is given. Each call has a
    process of its own: two models at once may be more than the device holds. Memory is traced in another process,
    without a GPU, at the same time.
    """
    plain = dataclasses.replace(work, arms=None)
    began = time.monotonic()
    tracing = _begin_tracing(source, work, scratch)
    inspected = in_fork(_Seen, lambda send: _Inspection(source, plain, scratch, send).describe())
    if inspected.may_have_collided and tracing is not None:
        tracing.end()
        tracing = None
        remove_made(scratch.take_made())
        inspected = in_fork(_Seen, lambda send: _Inspection(source, plain, scratch, send).describe())
        if inspected.answer.problem is None:
            tracing = _begin_tracing(source, work, scratch)
    if inspected.failed_probing:
        # Perhaps for want of the batch that was tried: the user's own may do.
        unprobed = functools.partial(_Inspection, is_probing=False)
        again = in_fork(_Seen, lambda send: unprobed(source, plain, scratch, send).describe())
        inspected = inspected if again.answer.problem is not None else again
    found = inspected.answer.inspection
    if tracing is not None and found is not None and found.model is not None:
        seconds = time.monotonic() - began
        memory = _memory_of(tracing, found.model, work, seconds)
        found = dataclasses.replace(found, model=with_memory(found.model, memory))
        inspected = dataclasses.replace(inspected, answer=InspectionAnswer(found))
    if source.kind == "script" or found is None:
        finish(inspected.answer)
    _Inspection(source, plain, scratch, lambda seen: finish(seen.answer), is_probing=False).try_overrides(found)


def _begin_tracing(source: TrainingSource, work: InspectionWork, scratch: Scratch) -> Beside[_Seen] | None:
    """Begin to run the user's code up to its training without a GPU, and to trace its steps there; return the process.

    A process that has used a GPU cannot be forked for a backward pass, so that the one which sees how the code trains
    on the GPU cannot trace. ``None`` where nothing is to be traced.
    """
    if work.arms is None or work.arms.chip is None:
        return None
    output_dir = os.path.join(scratch.path, "traced")
    os.makedirs(output_dir, exist_ok=True)

    def trace(send: Callable[[_Seen], NoReturn]) -> NoReturn:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Two runs at a time may be more than the host holds. Then this one is the one to go.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        leave_large_weights_unset()
        on_cpu = dataclasses.replace(work, devices=RankDevices("cpu", work.devices.uuids))
        _Inspection(source, on_cpu, scratch, send, is_probing=False, output_dir=output_dir).describe()

    return Beside(_Seen, trace)


def _memory_of(tracing: Beside[_Seen], model: ModelFacts, work: InspectionWork, seconds: float) -> Memory:
    """Wait for the traced steps of a model, which was inspected in so many ``seconds``."""
    assert work.arms is not None
    if (unknown := model.interface.get("untraceable")) is not None:
        tracing.end()
        return Memory(unknown=unknown)
    seen = tracing.result(min(work.arms.within_seconds - seconds, max(_LEAST_WAIT_SECONDS, 2 * seconds)))
    if seen is None:
        return Memory(unknown="its process ended, or took too long")
    if seen.answer.inspection is None or seen.answer.inspection.model is None:
        problem = seen.answer.problem
        return Memory(unknown=problem.message if problem is not None else "it did not train without a GPU")
    traced = seen.answer.inspection.model
    return Memory(traced.memory, traced.interface.get("memory_unknown"))


@dataclass(frozen=True, slots=True)
class _Seen:
    """The result of one run of the user's code."""

    answer: InspectionAnswer
    failed_probing: bool = False
    """Whether it raised an error of its own with another batch than the user's."""
    may_have_collided: bool = False
    """Whether it raised an error that two runs at a time may cause: by a port that the other one has, or by a file."""


class _Inspection:
    """One run of the user's code up to its training; the process ends with ``finish``."""

    def __init__(
        self,
        source: TrainingSource,
        work: InspectionWork,
        scratch: Scratch,
        finish: Callable[[_Seen], NoReturn],
        *,
        is_probing: bool = True,
        output_dir: str | None = None,
    ) -> None:
        self._source = source
        self._work = work
        self._scratch = scratch
        self._output_dir = output_dir or scratch.output_dir
        self._is_on_cpu = work.devices.kind == "cpu"
        self._finish = finish
        self._environment = inspect_environment()
        self._written: WrittenFiles | None = None
        self._overlay = Overlay(
            self._output_dir,
            on_cpu=self._is_on_cpu,
            is_inspecting=True,
            is_probing=is_probing and source.kind == "script",
        )

    def describe(self) -> NoReturn:
        """Find out what the user's code trains; a script's overrides are tried too."""

        def on_train(trainer: Any, _: Callable[[], Any]) -> NoReturn:
            try:
                model = _model_facts(trainer, {"kind": "trainer", **self._overlay.made_from})
                self._check(trainer, self._overlay.tuned)
                model = add_memory(self._work, model, lambda: TrainerStep(trainer))
            except BaseException as error:
                self._fail(error)
            self._finish_with_model(model)

        try:
            self._enter()
            _intercept(on_train)
            _run_source(self._source, {}, self._output_dir)
        except BaseException as error:
            self._fail(error)

    def try_overrides(self, found: Inspection) -> NoReturn:
        """Build a ``Trainer`` with another batch than the user's own, and see whether it has that."""
        own = found.model.own if found.model is not None else None
        assert own is not None
        assert own.per_device_train_batch_size is not None
        wanted = probe(own.per_device_train_batch_size, own.gradient_accumulation_steps)
        try:
            self._enter()
            self._check(build_trainer(self._source, wanted), wanted)
        except BaseException as error:
            self._fail(error)
        self._finish(_Seen(InspectionAnswer(found)))

    def _enter(self) -> None:
        enter(self._source)
        self._written = WrittenFiles(
            self._source.cwd,
            self._scratch.made_list,
            lambda what, hint: self._fail(UserCodeError(f"{self._source.name} {what}", hint)),
        )
        self._written.watch()
        others = AccelerateInspection(self._work, self._source, self._finish_with_model)
        guard = Guard(
            self._source,
            lambda message, hint: self._fail(UserCodeError(message, hint)),
            is_known=others.is_at_work,
        )
        guard.install(self._scratch.stop_file)
        if self._source.kind == "script":
            others.install()
            LightningInspection(
                self._work,
                self._source,
                self._output_dir,
                self._finish_with_model,
                on_cpu=self._is_on_cpu,
            ).install()
        self._overlay.install()

    def _check(self, trainer: Any, wanted: Mapping[str, Any]) -> None:
        """Raise ``UserCodeError`` where the ``Trainer`` does not have what was wanted of it."""
        if ignored := self._overlay.ignored(trainer.args, wanted):
            raise UserCodeError(_ignored_message(self._source, ignored))

    def _finish_with_model(self, model: ModelFacts) -> NoReturn:
        """End the inspection with the facts of the model that the code trains."""
        written = () if self._written is None else tuple(self._written.first)
        found = dataclasses.replace(self._environment, model=model, written=written)
        self._finish(_Seen(InspectionAnswer(found)))

    def _fail(self, error: BaseException) -> NoReturn:
        is_own = isinstance(error, UserCodeError)
        failed_probing = not is_own and self._overlay.is_probing and bool(self._overlay.tuned)
        is_in_use = isinstance(error, OSError | torch.distributed.DistError)
        # One run may have read what the other one had only written a part of.
        may_have_collided = not is_own and (is_in_use or os.path.exists(self._scratch.made_list))
        problem = InspectionAnswer(problem=problem_of(error, self._source))
        self._finish(_Seen(problem, failed_probing, may_have_collided))


def _model_facts(trainer: Any, interface: dict[str, Any]) -> ModelFacts:
    """Return the model's facts, and the settings that the user's code would train with."""
    model, args = trainer.model, trainer.args
    config = getattr(model, "config", None)
    batch, accumulation = own_batch(args)
    checkpointing = bool(getattr(args, checkpointing_field(known_fields()), False))
    return ModelFacts(
        type(model).__name__,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        (attention_of(config),),
        gradient_checkpointing=bool(getattr(model, "supports_gradient_checkpointing", False)),
        num_labels=getattr(config, "num_labels", None),
        layer_classes=tuple(layer_classes(model)) if has_fsdp2() else (),
        own=OwnSettings(
            plain(args.optim),
            batch,
            accumulation,
            _precision(args),
            checkpointing or _checkpoints(model),
            attention_of(config),
        ),
        interface=interface,
        config=config_document(config),
        dtype=weight_dtype(model),
        samples=length(getattr(trainer, "train_dataset", None)),
        always_checkpoints=_checkpoints(model) and not checkpointing,
        dataloader_num_workers=args.dataloader_num_workers,
        in_batch_loss=_in_batch_loss(trainer),
    )


# Losses of sentence-transformers for which the other samples of a batch are the negatives.
_IN_BATCH_LOSSES = (
    "MultipleNegatives",
    "MegaBatch",
    "GIST",
    "ContrastiveTension",
    "BatchHard",
    "BatchAll",
    "BatchSemi",
)


def _in_batch_loss(trainer: Any) -> str | None:
    """Return the name of a loss that compares the samples of a batch, which another batch makes another training."""
    loss = type(getattr(trainer, "loss", None)).__name__
    return loss if any(part in loss for part in _IN_BATCH_LOSSES) else None


def _precision(args: Any) -> Precision:
    named: dict[Precision, Any] = {"bf16": args.bf16, "fp16": args.fp16, "tf32": args.tf32}
    return next((name for name, is_on in named.items() if is_on), "fp32")
