"""Run a trial of the user's own training code: start it, stop it once it is measured, judge it."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from autotune.core import loop as loop_interface
from autotune.core.candidate import Candidate
from autotune.core.lengths import PlannedRun, SampleLengths, shapes_of
from autotune.core.loop import LoopConfig, loop_arguments
from autotune.core.messages import TrialWork
from autotune.core.outcome import Completed, Failed, FailureReason, Measurement, OutOfMemory
from autotune.core.scratch import Scratch
from autotune.core.workload import Workload
from autotune.space.levers import HALF
from autotune.training.batches import SettingUnavailableError
from autotune.worker.rendezvous import Ranks
from autotune.worker.trial.measure import StepTimer, micro_steps_to_run, most_steps, prefetched_steps
from autotune.worker.trial.run import Send, Trial
from autotune.worker.trial.step_checks import NotTrainedError, StepChecks, problem_of_loss
from autotune.worker.user.adapter import Changes, Observer
from autotune.worker.user.code import UserCodeError, enter, foreseen, load_function, run_script, set_options
from autotune.worker.user.frameworks import OVERLAYS
from autotune.worker.user.guard import Guard
from autotune.worker.user.loader_overlay import MOST_PREFETCHED, LoaderOverlay, batch_of, cap_prefetching
from autotune.worker.user.loop_steps import LoopSteps, StepMarks
from autotune.worker.user.placeholder_steps import PlaceholderSteps, set_variables
from autotune.worker.user.samples import spread_loader
from autotune.worker.wrapping import around

# More steps than are measured must be possible: those that the end of the data cuts short do not count. A choice.
_SPARE_STEPS = 40


class OwnTrial(Trial):
    """A trial of the user's own code, whose process ends inside that code once enough is measured.

    The trial ends without an exception, which the code might catch: the result is sent and the process ends. A loop
    function marks its own steps. For a script on a framework with an overlay, the candidate's settings replace those of
    the framework, and its batch size that of the training ``DataLoader``, which the inspection found. A script with
    placeholders gets the settings by its command line, variables or files, and nothing of it is changed.
    """

    _epoch_batches: int | None = None
    """Batches after which the training's data ends, in a rehearsal; ``None`` where the data is repeated."""

    def __init__(
        self,
        workload: Workload,
        work: TrialWork,
        scratch: Scratch,
        send: Send,
        finish: Callable[[Any], NoReturn],
        ranks: Ranks | None = None,
    ) -> None:
        """Set up a trial. ``finish`` sends its outcome, or what a subclass finds instead, and ends the process."""
        super().__init__(workload, work, scratch, send, ranks)
        assert self._workload.source is not None
        self._source = self._workload.source
        self._finish = finish
        self._is_unmodified = work.unmodified
        self._has_placeholders = self._source.framework == "placeholders"
        # A script with placeholders is measured wherever it begins to train: the guard allows its steps.
        self._guard = Guard(self._source, self._refuse, is_known=lambda: self._has_placeholders)
        self._timer: StepTimer | None = None
        self._steps: StepMarks | None = None

    def run_code(self, output_dir: str) -> None:
        """Run the user's code with the candidate's settings, until the trial ends the process."""
        if self._source.kind == "loop":
            self._run_function()
        elif self._has_placeholders:
            self._run_with_placeholders(output_dir)
        else:
            self._run_on_framework(output_dir)

    def run_and_end(self) -> NoReturn:
        """Run the user's code and end the process with the outcome."""
        try:
            self._open_device()
            self._phases.enter(self._source.kind)
            enter(self._source)
            cap_prefetching()
            self._guard.install(self._scratch.stop_file)
            note_cache_files(self._scratch.cache_list)
            self.run_code(self._scratch.output_dir)
            raise UserCodeError(
                f"{self._source.name} ended before enough steps were measured",
                "have it train for more steps, or on more data",
            )
        except BaseException as error:
            self._end_after(error)

    def _end_after(self, error: BaseException) -> NoReturn:
        """End the process after an error, which is ignored if enough was measured."""
        if self._timer is not None and self._timer.timed_measurement is not None:
            # Only the profiled step failed, after all that is needed was measured.
            self._end(self._completed(self._timer.timed_measurement, None))
        # A loop that ends by itself, or is left, has been measured as far as it went.
        ended_itself = isinstance(error, UserCodeError | SystemExit)
        if ended_itself and self._steps is not None and self._timer is not None and self._timer.has_measured:
            self._end_measured(self._timer.measurement())
        if isinstance(self._steps, LoopSteps) and self._steps.is_incomplete:
            # The error would end a real training, too, in its first epoch.
            outcome = self._outcome_of_error(error)
            if isinstance(outcome, Failed) and outcome.reason == "error":
                where = "in the incomplete last batch of an epoch, which drop_last=True leaves out"
                self._end(dataclasses.replace(outcome, message=f"{outcome.message} ({where})"))
        if self._is_open:
            self._meter.lift_limit()
        self._end(self._outcome_of_error(error))

    def _make_timer(self, *args: Any, **kwargs: Any) -> StepTimer:
        """Return the timer of steps, which excludes the time of ``torch.save``."""
        timer = super()._make_timer(*args, **kwargs)

        def saved(save: Callable[..., Any], *given: Any, **named: Any) -> Any:
            with timer.saving():
                return save(*given, **named)

        around(torch, "save", saved)
        return timer

    def _warm_up_loading(self, workers: int, prefetch: int | None) -> None:
        """Add warm-up steps for the batches that ``workers`` processes have prefetched before the first step."""
        # A step on these batches waits less for data than later ones do.
        ahead = None if prefetch is None else min(prefetch, MOST_PREFETCHED)
        arm = dataclasses.replace(self._candidate.arm, dataloader_num_workers=workers, dataloader_prefetch_factor=ahead)
        more_steps = prefetched_steps(dataclasses.replace(self._candidate, arm=arm), self._effort)
        self._effort = dataclasses.replace(self._effort, warmup_steps=self._effort.warmup_steps + more_steps)

    def _make_checks(self) -> StepChecks:
        """Return the checks that judge whether steps really train, and end the process where they do not."""
        # Of a script with placeholders, samples are counted where its inspection saw them enter a model.
        samples = None if self._has_placeholders else self._candidate.per_device_train_batch_size
        # The process ends at once: their code might catch an exception.
        return StepChecks(self._source.name, samples, lambda error: self._end(self._failure(error)))

    def _refuse(self, error: UserCodeError) -> NoReturn:
        """End the process because the user's code cannot be measured."""
        self._end(self._outcome_of_error(error))

    def _outcome_of_error(self, error: BaseException) -> OutOfMemory | Failed:
        """Return the outcome of a trial that an error in the user's code ended; the message says what to look at."""
        error = foreseen(error, self._source)
        if isinstance(error, UserCodeError | SystemExit) and self._checks.has_run_out():
            message = f"{self._source.name} ran out of memory, and caught the error"
            return self._failure(NotTrainedError(message, is_out_of_memory=True))
        if isinstance(error, UserCodeError | SettingUnavailableError):
            hint = getattr(error, "hint", "")
            print(f"autotune: {error}; {hint}" if hint else f"autotune: {error}", file=sys.stderr)
            reason: FailureReason = "unavailable" if isinstance(error, SettingUnavailableError) else "error"
            return Failed(reason, str(error), during=self._phases.current)
        outcome = self._failure(error)
        if isinstance(outcome, OutOfMemory):
            file, trace = self._source.file, traceback.extract_tb(error.__traceback__)
            lines = [line.lineno for line in trace if line.filename == file]
            at = f" ({os.path.basename(file)}:{lines[-1]})" if lines else ""
            return dataclasses.replace(outcome, message=outcome.message + at)
        if isinstance(outcome, Failed):
            return dataclasses.replace(outcome, message=f"{self._source.name} raised {outcome.message}")
        return outcome

    def _end(self, outcome: Completed | OutOfMemory | Failed) -> NoReturn:
        """End the process with the outcome of the trial."""
        self._phases.end()
        self._finish(dataclasses.replace(outcome, phase_seconds=self._phases.seconds))

    def _run_function(self) -> None:
        """Call the user's loop function with the candidate's settings, perhaps with fewer micro-steps."""
        micro_steps = micro_steps_to_run(self._candidate, self._effort)
        reads_accumulation = "accumulation" in self._source.interface.searched
        arguments = loop_arguments(self._candidate)
        if reads_accumulation:
            arguments["gradient_accumulation_steps"] = micro_steps
        steps = self._loop_steps(micro_steps if reads_accumulation else 1, self._check_batch)
        # Some loops stop after as many batches as the loader is long: it must be longer than the trial.
        step_limit = most_steps(self._candidate, self._effort) + _SPARE_STEPS
        self._overlay_loader(None, least_batches=2 * step_limit * micro_steps, accumulation=micro_steps)
        loop_interface.listen(steps)
        load_function(self._source)(LoopConfig(**arguments))

    def _check_batch(self, loader: Any) -> None:
        """Raise ``UserCodeError`` where the loader's batch size is not proportional to the config's.

        It is compared with the loader's batch size in the inspection, at the config's default.
        """
        interface, asked = self._source.interface, self._candidate.per_device_train_batch_size
        seen, found = interface.loader_batch, batch_of(loader)
        if seen is None or found is None or "batch" not in interface.searched:
            return
        default = LoopConfig().per_device_batch_size
        if found * default != seen * asked:
            raise UserCodeError(
                f"{self._source.name} makes batches of {found} with a per_device_batch_size of {asked}, and of {seen} "
                f"with one of {default}",
                "make its loader's batch_size of config.per_device_batch_size",
            )

    def _run_on_framework(self, output_dir: str) -> None:
        """Run the script with the candidate's settings applied to its framework, perhaps with fewer micro-steps."""
        source, candidate = self._source, self._candidate
        searched = () if self._is_unmodified else source.interface.searched
        micro_steps = accumulation = candidate.gradient_accumulation_steps
        if "accumulation" in searched:
            micro_steps = micro_steps_to_run(candidate, self._effort)
        if micro_steps == accumulation:
            self._run_all_micro_steps()
        batch_size = candidate.per_device_train_batch_size if "batch" in searched else None
        self._overlay_loader(batch_size, accumulation=micro_steps)
        steps = self._loop_steps(micro_steps)
        changes = Changes.of(source, candidate, searched, micro_steps, epoch_batches=self._epoch_batches)
        set_options(changes.options)
        on_cpu, key = self._device_kind == "cpu", source.interface.loader_key
        OVERLAYS[source.framework](changes, Observer(output_dir, on_cpu=on_cpu, steps=steps, loader_key=key)).install()
        run_script(source, output_dir)

    def _run_with_placeholders(self, output_dir: str) -> None:
        """Run the script with placeholders filled by the candidate's values, or with its own defaults."""
        source, interface = self._source, self._source.interface
        self._run_all_micro_steps()
        words, variables = source.template.own_words() or (), dict[str, str]()
        if not self._is_unmodified:
            words, variables = source.template.fill(self._candidate, os.path.join(self._scratch.path, "filled"))
        set_variables(source.variables, variables)
        self._checks.watch.watch_checkpoints()
        self._checks.watch.watch_updates_by_hand()
        self._warm_up_loading(interface.loader_workers, interface.loader_prefetch)
        self._timer = self._make_timer(self._end_measured)
        steps = PlaceholderSteps(
            source.name,
            self._candidate,
            interface,
            self._timer,
            on_begin=self._begins,
            on_step=self._check_numerics,
            refuse=lambda message: self._refuse(UserCodeError(message)),
        )
        self._steps = self._checks.watch.listener = steps
        run_script(dataclasses.replace(source, argv=words), output_dir)
        # The script ended before enough was measured. One deviating step may be the short last step of an epoch.
        if steps.deviations > 1:
            raise UserCodeError(steps.deviation)

    def _check_numerics(self) -> None:
        """Refuse the trial where the script computes in another precision than requested, or checkpoints unasked."""
        if self._is_unmodified:
            return
        searched, arm, watch = self._source.interface.searched, self._candidate.arm, self._checks.watch
        seen = {dtype for _, dtype in watch.autocasts}
        name, wanted = self._source.name, HALF.get(arm.precision)
        if "precision" in searched and seen and wanted not in seen:
            self._refuse(UserCodeError(f"{name} computes in {' and '.join(sorted(seen))}, asked was {arm.precision}"))
        if "checkpointing" in searched and watch.checkpoints and not arm.gradient_checkpointing:
            self._refuse(UserCodeError(f"{name} recomputes activations, and was told not to"))

    def _run_all_micro_steps(self) -> None:
        """Run every micro-step of a step, for a training that cannot skip any."""
        self._effort = dataclasses.replace(self._effort, max_micro_steps=self._candidate.gradient_accumulation_steps)

    def _overlay_loader(self, batch_size: int | None, *, least_batches: int = 0, accumulation: int = 1) -> None:
        """Have the training loader made with ``batch_size`` (if any), the candidate's workers and spread samples."""
        arm, key = self._candidate.arm, self._source.interface.loader_key
        # 0 leaves the script's own workers.
        workers = 0 if self._is_unmodified else arm.dataloader_num_workers
        LoaderOverlay(
            key,
            batch_size,
            workers,
            arm.dataloader_prefetch_factor,
            least_batches=least_batches,
            accumulation=accumulation,
            on_made=functools.partial(spread_loader, accumulation=accumulation, shapes=self._shapes),
        ).install()

    def _loop_steps(self, accumulation: int | None, on_loader: Callable[[Any], None] = lambda _: None) -> LoopSteps:
        """Return the object that divides the loop into steps of ``accumulation`` micro-steps, and has them timed."""
        arm, interface = self._candidate.arm, self._source.interface
        self._warm_up_loading(
            arm.dataloader_num_workers or interface.loader_workers,
            arm.dataloader_prefetch_factor if arm.dataloader_num_workers else interface.loader_prefetch,
        )
        # How long the loop would train is unknown: the speed is estimated for one epoch.
        samples = interface.samples
        epoch_steps = max(1, samples // self._candidate.samples_per_step) if samples is not None else None
        run = planned_run(interface.lengths, self._candidate, epoch_steps, 1.0 if epoch_steps else None)
        timer = self._timer = self._make_timer(self._end_measured, run=run)
        if not self._is_unmodified and "precision" in interface.searched:
            self._checks.precision = self._device_kind, arm.precision

        steps = LoopSteps(
            self._source.name,
            accumulation,
            timer,
            may_skip=arm.precision == "fp16",
            on_begin=self._begins,
            on_loader=on_loader,
            on_batch=timer.takes,
        )
        self._steps = self._checks.watch.listener = steps
        return steps

    def _begins(self) -> None:
        """Allow the code to train, and measure it from now on."""
        self._guard.lift()
        searched, precision = self._source.interface.searched, self._candidate.arm.precision
        is_set = not self._is_unmodified and not self._has_placeholders and "precision" in searched
        if is_set and precision in ("fp32", "tf32"):
            # This overrides what the code has set.
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        self._phases.enter("train")
        self._meter.reset_peaks()

    def _end_measured(self, measured: Measurement) -> NoReturn:
        """End the process with a finished measurement, or with a failure where the last loss is not finite."""
        last = self._steps.loss if self._steps is not None else None
        loss = None if last is None else float(last.float().mean())
        if (problem := problem_of_loss(loss)) is not None:
            self._end(Failed("non_finite", problem, during="train"))
        self._end(self._completed(measured, loss))


def planned_run(
    lengths: SampleLengths | None, candidate: Candidate, steps: int | None, epochs: float | None
) -> PlannedRun:
    """Return a record of the training whose speed a trial estimates: its steps, and its batches' shapes and tokens.

    Shapes and tokens are computed where sample lengths are known. ``steps`` and ``epochs`` are ``None`` if unknown.
    """
    if lengths is None or not lengths.counts:
        return PlannedRun(steps, epochs)
    arm, ranks = candidate.arm, candidate.arm.data_parallel
    batching = lengths.batching(candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps, ranks)
    if arm.train_sampling_strategy is not None:
        batching = dataclasses.replace(batching, order="group_by_length")
    if arm.padding_free:
        batching = dataclasses.replace(batching, padding="rows", multiple=1)
    if arm.length_multiple is not None:
        batching = dataclasses.replace(batching, multiple=math.lcm(batching.multiple, arm.length_multiple))
    shapes, epoch_shapes = shapes_of(lengths, batching, steps), shapes_of(lengths, batching)
    tokens = shapes.mean_tokens * candidate.gradient_accumulation_steps
    varies = lengths.vary and batching.padding != "max_length"
    long_samples = lengths.long_in_row(batching.batch, shapes.longest_tokens) if batching.padding == "rows" else 1
    return PlannedRun(
        shapes.steps,
        epochs,
        new_shapes=shapes.new,
        epoch_shapes=min(shapes.new, epoch_shapes.new),
        new_in_steps=shapes.new_in_steps,
        step_tokens=tokens,
        varies=varies,
        long_samples=long_samples,
    )


def note_cache_files(list_file: str) -> None:
    """Write the names of cache files that ``datasets`` creates from now on to a list, for removal after the trial.

    Preprocessing with a function that depends on a script's arguments makes other files for each candidate, which are
    never read again.
    """

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        # datasets writes to a temporary file and moves it.
        if event == "os.rename":
            path = os.path.abspath(os.fsdecode(arguments[1]))
            name = os.path.basename(path)
            # A file that was there before is the user's.
            if name.startswith("cache-") and name.endswith(".arrow") and not os.path.exists(path):
                with open(list_file, "a", encoding="utf-8") as file:
                    file.write(f"{path}\n")

    sys.addaudithook(on_event)
