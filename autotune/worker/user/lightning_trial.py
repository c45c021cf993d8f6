"""Run trials of unmodified scripts that train with Lightning's ``Trainer`` (``lightning``, ``pytorch_lightning``).

The candidate's precision and accumulation are put over the arguments of the ``Trainer``, its batch over that of the
training ``DataLoader``. A callback, the last one, tells where batches and steps begin and end.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from autotune.space import precision_names
from autotune.worker.trial.measure import micro_steps_to_run
from autotune.worker.user.checkpointing import enable_checkpointing
from autotune.worker.user.code import UserCodeError, run_script
from autotune.worker.user.loop_steps import LoopSteps, batch_samples
from autotune.worker.user.loop_trial import StepsTrial
from autotune.worker.user.on_import import on_import

_TRAINERS = {
    "lightning.pytorch.trainer.trainer": "lightning.pytorch",
    "pytorch_lightning.trainer.trainer": "pytorch_lightning",
}
# Callbacks of Lightning's that write, stop the training, wait for a validation that is not run, or decide the batch.
_LEFT_OUT = (
    "Checkpoint", "EarlyStopping", "LearningRateMonitor", "DeviceStatsMonitor", "ProgressBar", "Timer",
    "BatchSizeFinder", "LearningRateFinder", "OnExceptionCheckpoint", "ThroughputMonitor",
    "GradientAccumulationScheduler",
)  # fmt: skip
# More than any trial trains for; schedules are made of it, so that it is no infinity.
_MANY_EPOCHS = 1_000_000


class LightningTrial(StepsTrial):
    """A trial of a script that trains with a Lightning ``Trainer``."""

    def run_code(self, output_dir: str) -> None:
        """Run the script with the candidate's settings."""
        candidate, interface = self._candidate, self._source.interface
        searched = () if self._is_unmodified else interface.searched
        accumulation = candidate.gradient_accumulation_steps
        run = micro_steps_to_run(candidate, self._effort) if "accumulation" in searched else accumulation
        if run == accumulation:
            self._run_all_micro_steps()
        self._overlay_loader(candidate.per_device_train_batch_size if "batch" in searched else None)
        changes: dict[str, Any] = {}
        if "precision" in searched:
            changes["precision"] = precision_names.LIGHTNING[candidate.arm.precision]
        if "accumulation" in searched:
            changes["accumulate_grad_batches"] = run
        checkpoints = "checkpointing" in searched and candidate.arm.gradient_checkpointing
        steps = self._watch(run, rehearses=False)

        def on_start(_: Any, module: Any) -> None:
            if checkpoints:
                enable_checkpointing(module)
            self.begins()

        LightningOverlay(output_dir, changes, on_start, steps, on_cpu=self._device_kind == "cpu").install()
        run_script(self._source, output_dir)
        raise UserCodeError(
            f"{self._source.name} ended before enough steps were measured",
            "have it train for more steps or on more data",
        )


class LightningOverlay:
    """What is put over every Lightning ``Trainer`` that is made in this process."""

    def __init__(
        self,
        output_dir: str,
        changes: dict[str, Any],
        on_start: Callable[[Any, Any], None],
        steps: LoopSteps | None = None,
        *,
        on_cpu: bool,
    ) -> None:
        self._quiet: dict[str, Any] = {
            "default_root_dir": output_dir,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "fast_dev_run": False,
            "profiler": None,
            "barebones": False,
            "max_epochs": _MANY_EPOCHS,
            "max_steps": -1,
            "max_time": None,
            "devices": 1,
            "num_nodes": 1,
            **({"accelerator": "cpu"} if on_cpu else {}),
        }
        self._changes = changes
        self._on_start = on_start
        self._steps = steps

    def install(self) -> None:
        """Wrap the class wherever it is imported from, once it is."""
        for name, package in _TRAINERS.items():
            on_import(name, functools.partial(self._wrap, package))

    def _wrap(self, package: str, module: ModuleType) -> None:
        kind: Any = module.Trainer
        make = kind.__init__

        @functools.wraps(make)
        def __init__(trainer: Any, *words: Any, **options: Any) -> None:  # noqa: N807
            given = options.get("callbacks") or []
            callbacks = [*given] if isinstance(given, list | tuple) else [given]
            logger = importlib.import_module(f"{package}.loggers.logger").DummyLogger()
            make(
                trainer,
                *words,
                **{
                    **options,
                    **self._quiet,
                    "logger": logger,
                    "callbacks": [*kept(package, callbacks), self._callback(package)],
                    **self._changes,
                },
            )

        kind.__init__ = __init__

        def nothing(*_: Any, **__: Any) -> list[Any]:
            return []

        for name in ("validate", "test", "predict", "save_checkpoint"):
            setattr(kind, name, nothing)

    def _callback(self, package: str) -> Any:
        base: Any = importlib.import_module(f"{package}.callbacks").Callback
        overlay = self

        class Tells(base):  # type: ignore[misc]
            """Tells where the training, its batches and its steps begin and end."""

            _asked = 0.0

            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                for config in trainer.lr_scheduler_configs:
                    # Metrics of a validation that is not run are missing.
                    config.strict = False
                overlay._on_start(trainer, pl_module)
                if overlay._steps is not None:
                    overlay._steps.begin()
                self._asked = time.perf_counter()

            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                if overlay._steps is not None:
                    overlay._steps.micro_step_begins(time.perf_counter() - self._asked, batch_samples(batch))

            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                if overlay._steps is not None:
                    # The optimizer's step contains the forward and the backward pass.
                    overlay._steps.backward_within_step_ends()

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                if overlay._steps is not None:
                    overlay._steps.micro_step_ends()
                self._asked = time.perf_counter()

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                if overlay._steps is not None:
                    overlay._steps.data_is_over()

        return Tells()


def kept(package: str, callbacks: list[Any]) -> list[Any]:
    """Return the callbacks that a trial runs with: the user's own, and those of Lightning's that only compute."""
    known = importlib.import_module(f"{package}.callbacks")
    left_out = tuple(getattr(known, name) for name in _LEFT_OUT if hasattr(known, name))
    # LightningCLI adds one that writes the configuration into the logger's folder.
    saves_config = getattr(sys.modules.get(f"{package}.cli"), "SaveConfigCallback", None)
    left_out += () if saves_config is None else (saves_config,)
    return [callback for callback in callbacks if not isinstance(callback, left_out)]
