"""Run trials of the user's own training loop: a function that is given a ``LoopConfig``, or a script on a framework.

A function says where its steps are. Of a script whose framework has an adapter, the candidate's settings are put over
those of the framework, its batch over that of the training ``DataLoader``, which the inspection found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from autotune.core import loop as loop_interface
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import InspectionAnswer
from autotune.core.loop import LoopConfig, loop_arguments
from autotune.core.outcome import Completed, Failed, Measurement
from autotune.worker.facts import inspect_environment
from autotune.worker.trial.listener import StepListener
from autotune.worker.trial.losses import problem_of_loss
from autotune.worker.trial.measure import micro_steps_to_run, most_steps
from autotune.worker.trial.training_watch import TrainingWatch
from autotune.worker.user.adapter import Changes
from autotune.worker.user.code import UserCodeError, enter, load_function, run_script
from autotune.worker.user.epoch_order import spread_loader
from autotune.worker.user.frameworks import ADAPTERS
from autotune.worker.user.guard import Guard
from autotune.worker.user.inspection import Code, Finish, check_gradients, facts_of, problem_of
from autotune.worker.user.loader_overlay import LoaderOverlay, batch_of, with_loader
from autotune.worker.user.loop_steps import LoopSteps, MarkedSteps
from autotune.worker.user.own_trial import OwnTrial, planned_run
from autotune.worker.user.protection import keep_run
from autotune.worker.user.sample_lengths import lengths_of_loader
from autotune.worker.user.script_options import set_options

# Steps that the ends of the data cut short are not counted. A choice.
_SPARE_STEPS = 40


class StepsTrial(OwnTrial):
    """A trial whose steps are told apart by ``LoopSteps``, or as those are."""

    _steps: MarkedSteps

    def _run_all_micro_steps(self) -> None:
        """Measure steps that are whole: none of their micro-steps is left out."""
        accumulation = self._candidate.gradient_accumulation_steps
        self._effort = dataclasses.replace(self._effort, max_micro_steps=max(3, accumulation))

    def _overlay_loader(self, batch: int | None, *, least_batches: int = 0, accumulation: int = 1) -> None:
        """Give the training loader the candidate's loading processes, and a batch."""
        arm, key = self._candidate.arm, self._source.interface.loader_key
        workers = 0 if self._is_unmodified else arm.dataloader_num_workers
        LoaderOverlay(
            key,
            batch,
            workers,
            arm.dataloader_prefetch_factor,
            least_batches=least_batches,
            accumulation=accumulation,
            on_made=functools.partial(spread_loader, accumulation=accumulation, visits=self._visits),
        ).install()

    def _set_tf32(self) -> None:
        """Have products of float32 matrices computed as the candidate's precision says, whatever the code has set."""
        precision = self._candidate.arm.precision
        if self._is_unmodified or precision not in ("fp32", "tf32"):
            return
        if "precision" in self._source.interface.searched:
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

    def _watch(self, accumulation: int | None) -> LoopSteps:
        """Return what divides the loop into steps, and measures them."""
        arm, interface = self._candidate.arm, self._source.interface
        self._warm_up_loading(
            arm.dataloader_num_workers or interface.loader_workers,
            arm.dataloader_prefetch_factor if arm.dataloader_num_workers else interface.loader_prefetch,
        )
        samples = interface.samples
        steps = max(1, samples // self._candidate.samples_per_step) if samples is not None else None
        timer = self._timer = self._make_timer(
            self._enough, run=planned_run(interface.lengths, self._candidate, steps, 1.0 if steps else None)
        )
        if not self._is_unmodified and "precision" in interface.searched:
            self._checks.precision = self._device_kind, arm.precision

        watched = self._steps = self._checks.watch.listener = LoopSteps(
            self._source.name,
            accumulation,
            self._timer,
            may_skip=arm.precision == "fp16",
            on_batch=timer.takes,
        )
        return watched

    def begins(self) -> None:
        """Let the code train, and measure it from now on."""
        self._guard.lift()
        self._set_tf32()
        self._phases.enter("train")
        self._meter.reset_peaks()

    def _enough(self, measured: Measurement) -> NoReturn:
        self._end(self._judged_measurement(measured))

    def _judged_measurement(self, measured: Measurement) -> Completed | Failed:
        loss = None if self._steps.loss is None else float(self._steps.loss.float().mean())
        if (problem := problem_of_loss(loss)) is not None:
            return Failed("non_finite", problem, during="train")
        return self._completed(measured, loss)

    def _end_after(self, error: BaseException) -> NoReturn:
        # A loop that ends by itself, or is left, has been measured as far as it went.
        is_over = isinstance(error, UserCodeError | SystemExit)
        if is_over and self._timer is not None and self._timer.has_measured:
            self._end(self._judged_measurement(self._timer.measurement()))
        steps = getattr(self, "_steps", None)
        if isinstance(steps, LoopSteps) and steps.is_incomplete:
            # It would end the training, too, in its first epoch.
            outcome = self._judged(error)
            if isinstance(outcome, Failed) and outcome.reason == "error":
                told = "in the incomplete last batch of an epoch, which drop_last=True leaves out"
                self._end(dataclasses.replace(outcome, message=f"{outcome.message} ({told})"))
        super()._end_after(error)


class LoopTrial(StepsTrial):
    """A trial of a function that trains, given a ``LoopConfig``."""

    def run_code(self, output_dir: str) -> None:
        """Call the function with the candidate's settings."""
        run = micro_steps_to_run(self._candidate, self._effort)
        reads_accumulation = "accumulation" in self._source.interface.searched
        arguments = loop_arguments(self._candidate)
        if reads_accumulation:
            arguments["gradient_accumulation_steps"] = run
        watched = self._watch(run if reads_accumulation else 1)
        # Some loops count their batches against the length of the loader.
        steps = most_steps(self._candidate, self._effort) + _SPARE_STEPS
        self._overlay_loader(None, least_batches=2 * steps * run, accumulation=run)
        loop_interface.listen(Announced(watched, self.begins, self._check_batch))
        load_function(self._source)(LoopConfig(**arguments))

    def _check_batch(self, loader: Any) -> None:
        """Raise ``UserCodeError`` where the loader's batch does not follow the config's, as the first run saw it do."""
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


class ScriptTrial(StepsTrial):
    """A trial of a script that is changed by nothing but what is put over its framework."""

    def run_code(self, output_dir: str) -> None:
        """Run the script with the candidate's settings."""
        source, candidate = self._source, self._candidate
        takes = () if self._is_unmodified else source.interface.searched
        self._run = accumulation = candidate.gradient_accumulation_steps
        if "accumulation" in takes:
            self._run = micro_steps_to_run(candidate, self._effort)
        if self._run == accumulation:
            self._run_all_micro_steps()
        batch = candidate.per_device_train_batch_size if "batch" in takes else None
        self._overlay_loader(batch, accumulation=self._run)
        self.output_dir, self.is_on_cpu = output_dir, self._device_kind == "cpu"
        self._announced: Announced | None = None
        changes = Changes.of(source, candidate, takes, self._run, lambda _: None)
        set_options(changes.options)
        ADAPTERS[source.framework].measure(changes, self)
        run_script(source, output_dir)

    def steps(self) -> LoopSteps:
        """Return what is to be told of the batches and steps, after ``begins``."""
        return self._watch(self._run)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Give the batches of a loader, and measure from the first one on."""
        if self._announced is None:
            self._announced = Announced(self._watch(self._run), self.begins)
        return self._announced.batches(loader)  # type: ignore[no-any-return]


class Announced:
    """Tells when the first batch is asked for, then hands everything on."""

    def __init__(
        self, steps: LoopSteps, on_begin: Callable[[], None], look_at: Callable[[Any], None] = lambda _: None
    ) -> None:
        self._steps = steps
        self._on_begin: Callable[[], None] | None = on_begin
        self._look_at = look_at

    def _begin(self) -> None:
        begin, self._on_begin = self._on_begin, None
        if begin is not None:
            begin()

    def batches(self, loader: Any) -> Any:
        """Give the batches of a loader."""
        self._look_at(loader)
        self._begin()
        return self._steps.batches(loader)

    def micro_step(self) -> Any:
        """Mark what is done within as a micro-step."""
        self._begin()
        return self._steps.micro_step()


# What a process sees of the loop before the first trial


def inspect(code: Code, finish: Finish) -> NoReturn:
    """Run the loop with the default settings to the end of its first step, and say what it trains and what it read."""
    source, environment = code.source, inspect_environment()
    config, watch = LoopConfig(), TrainingWatch()
    loaders: list[Any] = []

    def fail(error: BaseException) -> NoReturn:
        finish(InspectionAnswer(problem=problem_of(error, source)))

    def on_step() -> NoReturn:
        check_gradients(watch, source)
        loader = loaders[0] if loaders else None
        searched = tuple(short for short, name in loop_interface.FIELDS.items() if name in config.was_read)
        interface = CodeInterface("loop", searched, loader_batch=batch_of(loader))
        model = dataclasses.replace(
            facts_of(watch.model, loader),
            gradient_checkpointing="checkpointing" in searched,
            interface=dataclasses.replace(with_loader(interface, loader), lengths=lengths_of_loader(loader)),
        )
        keep_run()
        finish(InspectionAnswer(dataclasses.replace(environment, model=model)))

    def refuse(message: str, hint: str) -> None:
        fail(UserCodeError(message, hint))

    class UntilFirstStep(StepListener):
        def step_ends(self, marks: tuple[Any, Any], wait_seconds: float | None = None) -> None:
            on_step()

        def step_is_dropped(self) -> None:
            # A step of fewer samples shows as much.
            on_step()

    guard = Guard(source, refuse)

    steps = LoopSteps(source.name, None, UntilFirstStep())

    def begin() -> None:
        guard.lift()
        watch.begin()

    try:
        enter(source)
        guard.install(code.scratch.stop_file)
        LoaderOverlay().install()
        watch.listener = steps
        watch.install()
        loop_interface.listen(Announced(steps, begin, loaders.append))
        load_function(source)(config)
        raise UserCodeError(
            f"{source.name} ended without a step of an optimizer within autotune.steps",
            "go over autotune.steps(loader) in the training loop: for batch in autotune.steps(loader): …",
        )
    except BaseException as error:
        fail(error)
