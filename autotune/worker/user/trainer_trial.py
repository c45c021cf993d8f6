"""Run trials of the user's own Trainer or script, and stop within ``Trainer.train`` once measured.

We raise no exception in user code, because it might catch it. The callback sends the result and ends the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from autotune.core.candidate import Document
from autotune.core.lengths import PlannedRun
from autotune.core.outcome import Failed, Measurement
from autotune.space.arms import applied_settings
from autotune.space.training_arguments import training_arguments
from autotune.training import apply
from autotune.worker.arrays import arrays_in
from autotune.worker.private.transformers import change_train_sampler, mean_train_loss, remove_reporting_callbacks
from autotune.worker.trial.measure import StepTimer, micro_steps_to_run
from autotune.worker.trial.run import LeftOutInputs, TrainerSteps, known_fields
from autotune.worker.trial.step_checks import LossWatch
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.inspection import length
from autotune.worker.user.loader_overlay import batch_of
from autotune.worker.user.own_trial import OwnTrial, planned_run
from autotune.worker.user.samples import SpreadSampler, can_spread
from autotune.worker.user.trainer_code import TrialFields, intercept, own_batch, run_source
from autotune.worker.user.trainer_fields import difference_from_candidate, generates

# Limit on a trial's steps, as a multiple of the steps to time: those cut short by the end of an epoch do not count.
_SPARE_STEPS = 20


class _WholeSteps(TrainerSteps):
    """Times whole steps only, and prevents logging, evaluation and saving."""

    def __init__(self, timer: StepTimer, check_loader: Callable[[Any], None]) -> None:
        super().__init__(timer)
        self._check_loader = check_loader
        """Called with the training loader before the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the loader; start the timer. Raises ``UserCodeError`` without data for a whole step."""
        loader = kwargs.get("train_dataloader")
        samples = length(getattr(loader, "dataset", None))
        step_samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if samples is not None and samples < step_samples:
            raise UserCodeError(f"its training data has {samples} samples, too few for a step of {step_samples}")
        self._check_loader(loader)
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Time the step, or drop it where the end of the data cut it short."""
        if self._is_whole(args, state, kwargs.get("train_dataloader")):
            super().on_step_end(args, state, control)
        else:
            self.timer.step_is_dropped()
        prevent_side_actions(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prevent logging, evaluation and saving between epochs."""
        prevent_side_actions(control)

    def _is_whole(self, args: Any, state: Any, loader: Any) -> bool:
        """Return whether the step that ends has all its micro-steps and samples."""
        if self.timer.micro_steps_begun < args.gradient_accumulation_steps:
            return False
        # Only the last batch of an epoch may be smaller.
        if abs(state.epoch - round(state.epoch)) > 1e-9:
            return True
        samples = length(getattr(loader, "dataset", None))
        return args.dataloader_drop_last or (
            samples is not None and samples % (args.train_batch_size * args.world_size) == 0
        )


def prevent_side_actions(control: Any) -> None:
    """Have a ``Trainer`` neither log, evaluate, save nor stop now; ``control`` is what it gives to its callbacks."""
    control.should_log = control.should_evaluate = control.should_save = False
    # A callback of the user's own may stop a training that is only measured.
    control.should_training_stop = False


class TrainerTrial(OwnTrial):
    """A trial whose model, data and ``Trainer`` the user's code makes."""

    _has_ready_batches = False
    """Whether the training loader has no batch size: its data make the batches."""

    @property
    def _wanted(self) -> Document:
        """The fields of ``TrainingArguments`` to set for the candidate; none in a trial of the user's own settings."""
        return (
            {} if self._is_unmodified else dict(training_arguments(self._candidate, known_fields(), self._device_kind))
        )

    def run_code(self, output_dir: str) -> NoReturn:
        """Run the user's code with the candidate's ``TrainingArguments``, until it calls ``Trainer.train``.

        There ``_train_own`` takes over, and ends the process. A trial may run fewer micro-steps than the candidate has,
        which stand for all of them.
        """
        accumulation = self._candidate.gradient_accumulation_steps
        self._fields = TrialFields(
            output_dir,
            # A function that builds a Trainer gets the fields as its argument, from run_source.
            tuned=self._wanted if self._source.kind == "script" else {},
            shortened_accumulation=(accumulation, micro_steps_to_run(self._candidate, self._effort)),
            on_cpu=self._device_kind == "cpu",
        )
        self._fields.install()
        intercept(self._train_own)
        run_source(self._source, self._wanted, output_dir)

    def _train_own(self, trainer: Any, train: Callable[[], Any]) -> NoReturn:
        """Measure ``train``, the original of ``Trainer.train``, and end the process with the outcome."""
        # Until here, the guard ends the process at any training step.
        self._guard.lift()
        try:
            self._fields.begin(trainer)
            self._check(trainer)
            self._prepare(trainer)
            self._phases.enter("train")
            train()
            raise UserCodeError(f"{self._source.name} stopped training before enough steps were measured")
        except BaseException as error:
            self._end_after(error)

    def _check(self, trainer: Any) -> None:
        """Raise an error where the ``Trainer``'s arguments or devices differ from the candidate's."""
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
        self._fields.check(self._source, trainer.args, self._wanted)
        # Of the user's own settings, the candidate has the batch and accumulation that the inspection found.
        inspected = (self._candidate.per_device_train_batch_size, self._candidate.gradient_accumulation_steps)
        if self._is_unmodified and (pair := own_batch(trainer.args)) != inspected:
            # The speed would be computed from another number of samples than are trained on.
            raise UserCodeError(
                f"{self._source.name} trains with {pair[0]} × {pair[1]} samples here, and trained with "
                f"{inspected[0]} × {inspected[1]} when it was looked at"
            )

    def _check_begun(self, trainer: Any, loader: Any) -> None:
        """Check a ``Trainer`` that begins to train, and its loader. Raises ``UserCodeError`` for other settings."""
        self._has_ready_batches = batch_of(loader) is None and not generates(trainer.args)
        if self._is_unmodified:
            return
        difference = self._fields.first_ignored(trainer.args, self._wanted)
        if difference is None:
            difference = difference_from_candidate(trainer, self._candidate, loader)
        if difference is not None:
            raise UserCodeError(
                f"{self._source.name} trains otherwise than it was told: {difference}",
                "leave that to its TrainingArguments",
            )

    def _record_batch(self, inputs: Any) -> None:
        """Record a batch for the timer. Where the data makes the batches, refuse one larger than the candidate's."""
        # The smallest first dimension: some arrays may have more rows than samples.
        samples = min((int(array.shape[0]) for array in arrays_in(inputs) if array.shape), default=0)
        asked = self._candidate.per_device_train_batch_size
        if self._has_ready_batches and samples > asked:
            message = f"the batches of {self._source.name} have {samples} samples where {asked} were set"
            hint = "make the batches of args.per_device_train_batch_size samples"
            self._refuse(UserCodeError(message, hint))
        assert self._timer is not None
        self._timer.takes(inputs)

    def _apply(self, trainer: Any) -> None:
        """Apply the settings of the candidate that are no ``TrainingArguments``, and remove reporting callbacks."""
        remove_reporting_callbacks(trainer)
        if not self._is_unmodified:
            apply(trainer, **applied_settings(self._candidate.arm))
            if self._candidate.arm.cuda_graphs:
                self._watch_graphs(trainer.training_step)

    def _prepare(self, trainer: Any) -> None:
        """Set up a ``Trainer`` to measure its steps, with an upper limit on their number. Does not train yet."""
        self._apply(trainer)
        full_run = self._full_run(trainer)
        self._spread_steps(trainer, full_run)
        loss_watch = LossWatch(trainer)
        if self._fields.shortened_accumulation is None:
            # The fields dropped it, since the Trainer generates its samples for a whole step.
            self._run_all_micro_steps()
        args = trainer.args
        self._warm_up_loading(args.dataloader_num_workers, args.dataloader_prefetch_factor)
        self._timer = self._make_timer(functools.partial(self._end_trained, trainer, loss_watch), run=full_run)
        self._inputs = LeftOutInputs(trainer, self._candidate.gradient_accumulation_steps, self._record_batch)
        trainer.add_callback(_WholeSteps(self._timer, functools.partial(self._check_begun, trainer)))
        args.max_steps = _SPARE_STEPS * (self._effort.warmup_steps + self._effort.max_steps)
        self._meter.reset_peaks()

    def _full_run(self, trainer: Any) -> PlannedRun:
        """Return the length and batch shapes of the user's whole training, with the candidate's batch."""
        args, samples = trainer.args, length(getattr(trainer, "train_dataset", None))
        steps, epochs = args.max_steps, None
        if steps <= 0:
            epochs = float(args.num_train_epochs)
            step_samples = self._candidate.samples_per_step
            steps = max(1, round(samples * epochs / step_samples)) if samples is not None else None
        return planned_run(self._source.interface.lengths, self._candidate, steps, epochs)

    def _spread_steps(self, trainer: Any, full_run: PlannedRun) -> None:
        """Draw the trial's few steps from all over an epoch, if samples may be reordered."""
        lengths = self._source.interface.lengths
        batch_size = trainer.args.train_batch_size
        step_samples = batch_size * trainer.args.gradient_accumulation_steps * self._ranks.count

        def spread(make_sampler: Callable[[], Any]) -> Any:
            sampler = make_sampler()
            if not can_spread(sampler):
                return sampler
            return SpreadSampler(
                sampler,
                batch_size,
                step_samples,
                longest=lengths.longest_samples if lengths is not None else (),
                longest_steps=self._effort.warmup_steps,
                longest_per_batch=full_run.long_samples,
                shapes=self._shapes,
            )

        change_train_sampler(trainer, spread)

    def _end_trained(self, trainer: Any, loss_watch: LossWatch, measured: Measurement) -> NoReturn:
        """End the process with a finished measurement, or with a failure where a loss was not finite."""
        if (problem := loss_watch.problem()) is not None:
            self._end(Failed("non_finite", problem, during="train"))
        self._end(self._completed(measured, mean_train_loss(trainer), trainer))
