"""Train for real with the winner of a study, in the user's own code, which is changed in nothing else.

The code is run as ``python`` would run it. Libraries are wrapped when the code imports them, so that what the code does
before an import has its effect. A training that begins with other settings ends before its second step, with the
reason. Run with ``python -m`` by ``autotune run``, and by ``torchrun`` for each rank.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from autotune.core.errors import TrainingSourceError
from autotune.core.loop import LoopConfig
from autotune.core.real_training import VARIABLE, RealTraining
from autotune.core.schema import decode
from autotune.space.arms import applied_settings
from autotune.worker.process import leave
from autotune.worker.user.adapter import Changes
from autotune.worker.user.code import load_function, run_as_main, set_options
from autotune.worker.user.frameworks import OVERLAYS
from autotune.worker.user.trainer_fields import TrainerFields, difference_from_candidate
from autotune.worker.wrapping import after, around, before, on_import

if TYPE_CHECKING:
    from autotune.worker.user.run_watch import LoopWatch


def main() -> None:
    """Train in this process with the winner of a study, which an environment variable describes."""
    training = decode(json.loads(os.environ.pop(VARIABLE)), RealTraining)
    source = training.source
    if training.cpu_core is not None:
        # Pinned as in the trial that was measured. Processes that load data have all cores.
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {training.cpu_core})
        os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, cores))
    sys.argv = [source.file, *source.argv]
    # As python does: the script's folder comes first, or the working folder for a module.
    sys.path[0] = os.getcwd() if source.module else str(Path(source.file).parent)
    run = {"trainer": TrainerRun, "placeholders": Run}.get(source.framework, LoopRun)(training)
    try:
        run.install()
        if source.kind == "build":
            load_function(source)(dict(training.arguments)).train()
        elif source.kind == "loop":
            load_function(source)(LoopConfig(**training.arguments))
        else:
            run_as_main(source, source.argv)
        run.end()
    except SystemExit as error:
        if error.code in (None, 0):
            run.end()
        raise
    finally:
        if training.folder:
            # A temporary folder of autotune's own.
            shutil.rmtree(training.folder, ignore_errors=True)


def _print_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"autotune: {text}", file=sys.stderr, flush=True)


class Run:
    """A training of which nothing has to be set: its command line says everything."""

    def __init__(self, training: RealTraining) -> None:
        self.training = training
        self.name = training.source.name
        self.is_verified = False
        """Whether a first step with the winner's settings was seen, or none has to be."""
        self._watch: LoopWatch | None = None

    def install(self) -> None:
        """Set up the watch of the training. Settings are on its command line, and need no check."""
        self.is_verified = True
        on_import("torch", lambda _: self.watch_loop())

    def watch_loop(self) -> None:
        """Watch the training loop until its end, if the winner of the search came with a promised speed."""
        from autotune.worker.user.run_watch import LoopWatch, RunWatch

        if self.training.promise is not None:
            samples = self.training.candidate.samples_per_step
            self._watch = LoopWatch(RunWatch(self.training.promise, _print_once), samples)
            self._watch.install()

    def stop(self, message: str, hint: str) -> NoReturn:
        """End the process at once. The user's code might catch an error."""
        print(f"autotune: {message}: {hint}" if hint else f"autotune: {message}", file=sys.stderr)
        leave(TrainingSourceError.exit_code)

    def end(self) -> None:
        """Report how the run went; end with an error where no step could be verified."""
        if self._watch is not None:
            self._watch.end()
        if not self.is_verified:
            self.stop(
                f"{self.name} ended without a step that could be looked at",
                "it is not known whether it trained with what was set",
            )

    def watch_first_step(self, accumulation: int | None) -> Any:
        """Return a watch that checks the first step and its passes (``accumulation``). Needs torch."""
        from autotune.worker.trial.step_checks import FirstStepWatch

        return FirstStepWatch(self.training, self.stop, accumulation, self._first_step_seen)

    def _first_step_seen(self) -> None:
        self.is_verified = True


class TrainerRun(Run):
    """A training with ``transformers.Trainer``."""

    def install(self) -> None:
        """Wrap the classes of ``Trainer`` once they are imported."""
        training = self.training
        # A function that builds the Trainer gets the fields as its argument.
        tuned = {} if training.source.kind == "build" else training.arguments
        self._fields = TrainerFields(tuned=tuned, say=_print_once)
        on_import("transformers.training_args", lambda module: self._fields.watch_arguments(module.TrainingArguments))

        def wrap(module: ModuleType) -> None:
            before(module.Trainer, "train", lambda trainer, *_, **__: self.begin(trainer))
            # Wrapped around ``begin``, so it runs earlier: it sets the winner's fields in the arguments of the Trainer.
            self._fields.watch_trainer(module.Trainer)
            # Wrapped last, so that it runs first.
            if training.recovery is not None:
                around(module.Trainer, "train", self._train_recovering)

        on_import("transformers.trainer", wrap)

    def _train_recovering(self, train: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``Trainer.train``, in a repeated attempt from the last checkpoint of this run, if there is one.

        When out of memory, note so in the recovery file and end the process: ``autotune run`` then starts it again.
        """
        from autotune.worker.failures import is_out_of_memory

        recovery = self.training.recovery
        assert recovery is not None
        if trainer.args.save_strategy == "no":
            self.stop(
                f"{self.name} writes no checkpoints, from which --recover would go on",
                "have it save (--save_strategy steps), or leave --recover out",
            )
        if recovery.attempt and not args and kwargs.get("resume_from_checkpoint") is None:
            found = Path(trainer.args.output_dir).glob("checkpoint-*/trainer_state.json")
            written = [path for path in found if path.stat().st_mtime >= recovery.since]
            if written:
                last = max((path.parent for path in written), key=lambda folder: int(folder.name.rpartition("-")[2]))
                kwargs["resume_from_checkpoint"] = str(last)
                _print_once(f"goes on from {last}")
        try:
            return train(trainer, *args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error, 1.0):
                raise
            traceback.print_exc()
            Path(recovery.file).write_text("out of memory", encoding="ascii")
            leave(1)

    def begin(self, trainer: Any) -> None:
        """Apply the winner's settings to a ``Trainer`` at its first training, and have it checked as it begins."""
        if hasattr(trainer, "_autotune_begun"):
            return
        trainer._autotune_begun = True
        candidate, model = self.training.candidate, trainer.model
        attention = candidate.arm.attn_implementation
        # Of a model that was searched by name: the code may have loaded it with another attention.
        if self.training.has_adapters is not None and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(attention)
        from transformers import TrainerCallback

        from autotune.training import apply
        from autotune.training.batches import SettingUnavailableError

        try:
            # Also without settings: ``apply`` corrects how the loss is divided by the accumulation.
            apply(trainer, **applied_settings(candidate.arm))
        except SettingUnavailableError as error:
            self.stop(f"{self.name} cannot train as it was set: {error}", "")

        run = self

        class ChecksSettings(TrainerCallback):  # type: ignore[misc]
            """Checks a ``Trainer`` that is about to take its first step."""

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                run.check(trainer, kwargs.get("train_dataloader"))

        trainer.add_callback(ChecksSettings())
        if self.training.promise is not None:
            from autotune.worker.user.run_watch import RunWatch, watch_trainer

            watch_trainer(trainer, RunWatch(self.training.promise, _print_once))

    def check(self, trainer: Any, loader: Any) -> None:
        """End the process where a ``Trainer`` would train differently from the winner; else watch its first step."""
        difference = (
            self._fields.first_ignored(trainer.args, self.training.arguments)
            or difference_from_candidate(trainer, self.training.candidate, loader)
            or self._model_difference(trainer.model)
        )
        if difference is not None:
            self.stop(
                f"{self.name} does not train with the winner of {self.training.study}: {difference}",
                "set it so in the code, or search with the code as it is",
            )
        if not self.is_verified:
            self.is_verified = True
            first_step = self.watch_first_step(trainer.args.gradient_accumulation_steps)
            if self.training.candidate.arm.cuda_graphs:
                # The replay of a graph calls no module that the watch would see.
                trainer.training_step.on_replay = first_step.checks.watch.take_replay

    def _model_difference(self, model: Any) -> str | None:
        """Return how a model's dtype or adapters differ from the measured ones; ``None`` without a difference."""
        from autotune.worker.user.inspection import weight_dtype

        wanted, dtype, has_adapters = self.training, weight_dtype(model), hasattr(model, "peft_config")
        if wanted.dtype not in (None, dtype):
            return f"its weights are {dtype}, measured were {wanted.dtype}"
        if wanted.has_adapters not in (None, has_adapters):
            return "its model has adapters" if has_adapters else "its model has no adapters of peft"
        return None


class LoopRun(Run):
    """A training in a loop of the user's own: of a function, or of a script on a framework."""

    def install(self) -> None:
        """Wrap data loaders and the framework once they are imported."""
        source, candidate = self.training.source, self.training.candidate
        arm, searched, key = candidate.arm, source.interface.searched, source.interface.loader_key
        batch_size = candidate.per_device_train_batch_size if "batch" in searched and source.kind != "loop" else None
        self._loader_overlay: Any = None
        self._own_accumulation: int | None = None
        """The accumulation that the script gave its ``Accelerator``, if the winner's replaced it."""
        self._schedules: list[Any] = []
        """The learning rate schedules that the code has made."""

        def overrules(accumulation: int) -> None:
            self._own_accumulation = accumulation

        def change(_: ModuleType) -> None:
            from autotune.worker.user.loader_overlay import LoaderOverlay

            is_changed = key is not None and (batch_size is not None or arm.dataloader_num_workers > 0)
            others = self.training.loader_batches
            if is_changed or others:
                loading = arm.dataloader_num_workers, arm.dataloader_prefetch_factor
                changed_key = key if is_changed else None
                overlay = LoaderOverlay(changed_key, batch_size, *loading, others=others, say=_print_once)
                overlay.install()
                self._loader_overlay = overlay if is_changed else None
            # Installed first: the watch below removes its hook during a step, which only the last hook can.
            self.watch_loop()
            is_known = source.kind != "loop" or "accumulation" in searched
            self.watch_first_step(candidate.gradient_accumulation_steps if is_known else None)
            schedule = sys.modules["torch.optim.lr_scheduler"].LRScheduler
            after(schedule, "__init__", lambda _, made, *__, **___: self._schedules.append(made))

        # Not "torch.utils.data", which torch imports while half of it is not there yet.
        on_import("torch", change)
        if source.kind != "loop":
            accumulation = candidate.gradient_accumulation_steps
            changes = Changes.of(source, candidate, searched, accumulation, say=_print_once, overrules=overrules)
            set_options(changes.options)
            OVERLAYS[source.framework](changes).install()

    def _first_step_seen(self) -> None:
        """End the process where the code did not make the searched loader, or a schedule for the replaced settings.

        A learning rate schedule of a whole number of epochs was made for a batch and an accumulation: those that the
        code has by itself, if it does not learn of the winner's.
        """
        super()._first_step_seen()
        loader, interface = self._loader_overlay, self.training.source.interface
        if loader is None:
            return
        if loader.made is None:
            self.stop(
                f"{self.name} makes no training DataLoader at {interface.loader}, as it did when it was searched",
                "search with the script as it is now",
            )
        if not hasattr(loader.made.dataset, "__len__"):
            return
        accumulation, batch_size = self.training.candidate.gradient_accumulation_steps, loader.made.batch_size
        batches, own_size, own_accumulation = len(loader.made), loader.own_batch_size, self._own_accumulation
        for schedule in self._schedules:
            end = planned_updates(schedule)
            if end is None or (own_accumulation is None and is_made_for(end, batches, accumulation)):
                continue
            made_for = f"its learning rate schedule of {end} updates is made for"
            if own_accumulation is not None and is_made_for(end, batches, own_accumulation):
                self.stop(
                    f"{self.name} cannot train with an accumulation of {accumulation}: {made_for} one of "
                    f"{own_accumulation}",
                    f"write {accumulation} at {interface.accelerator}, or make it an option of its command line",
                )
            if not own_size or not batch_size or own_size == batch_size:
                continue
            if is_made_for(end, -(-batches * batch_size // own_size), accumulation):
                self.stop(
                    f"{self.name} cannot train with batches of {batch_size}: {made_for} batches of {own_size}",
                    f"write {batch_size} at {interface.loader} and where the schedule is made",
                )


def planned_updates(schedule: Any) -> int | None:
    """Return the number of updates after which a learning rate schedule ends, as far as its attributes show.

    This is the largest integer above 1 among the attributes and in its functions; ``None`` without one.
    """
    held = list(vars(schedule).values())
    for function in vars(schedule).get("lr_lambdas", ()):
        inner = getattr(function, "func", function)
        held += [*getattr(function, "keywords", {}).values(), *getattr(function, "args", ())]
        held += [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
        code = getattr(inner, "__code__", None)
        held += [inner.__globals__.get(name) for name in code.co_names] if code is not None else []
    return max((each for each in held if type(each) is int and each > 1), default=None)


def is_made_for(updates: int, batches: int, accumulation: int) -> bool:
    """Return whether ``updates`` are a whole number of epochs of so many ``batches``.

    The last step of each epoch, or of all epochs together, may be rounded up or down.
    """
    if updates % max(1, batches // accumulation) == 0 or updates % -(-batches // accumulation) == 0:
        return True
    total_batches = batches * max(1, round(updates * accumulation / batches))
    return updates in (total_batches // accumulation, -(-total_batches // accumulation))


if __name__ == "__main__":
    main()
