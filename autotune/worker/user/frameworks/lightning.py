"""Scripts that train with Lightning's ``Trainer`` or ``Fabric`` (``lightning``, ``pytorch_lightning``).

Precision and accumulation replace those of the ``Trainer``'s arguments. A callback, the last one, tells where the
training, its batches and its steps begin and end.

Precision replaces that of the ``Fabric`` that the script makes. The script accumulates by itself: the accumulation can
be searched where an option such as ``--gradient_accumulation_steps`` decides it.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from autotune.core.candidate import Precision
from autotune.space.levers import LIGHTNING, OF_LIGHTNING
from autotune.worker.user.adapter import AccumulatesBy, Observer, Overlay, silence
from autotune.worker.wrapping import around, before, on_import

if TYPE_CHECKING:
    from autotune.worker.user.loop_steps import LoopSteps

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Callbacks of Lightning's that write, stop the training, wait for a validation that is not run, or decide the batch.
_LEFT_OUT = (
    "Checkpoint", "EarlyStopping", "LearningRateMonitor", "DeviceStatsMonitor", "ProgressBar", "Timer",
    "BatchSizeFinder", "LearningRateFinder", "OnExceptionCheckpoint", "ThroughputMonitor",
    "GradientAccumulationScheduler",
)  # fmt: skip
# More epochs than any trial trains for. Schedules are computed from this number, so that it must be finite.
_MANY_EPOCHS = 1_000_000


class LightningOverlay(Overlay):
    """Changes every Lightning ``Trainer`` that is made in this process, and records its training."""

    framework = "lightning"
    # Options with a dot are LightningCLI's.
    known_options: ClassVar = {
        "batch": ("--batch_size", "--train_batch_size", "--data.batch_size", "--model.batch_size"),
        "accumulation": ("--accumulate_grad_batches", "--trainer.accumulate_grad_batches"),
        "precision": ("--precision", "--trainer.precision"),
        "workers": ("--num_workers", "--dataloader_num_workers", "--workers", "--data.num_workers"),
    }
    _trainer: Any = None
    """The ``Trainer`` that has begun to train."""

    def install(self) -> None:
        """Wrap ``Trainer`` once it is imported, from either package."""
        for package in _PACKAGES:
            on_import(f"{package}.trainer.trainer", functools.partial(self._wrap, package))

    def _wrap(self, package: str, module: ModuleType) -> None:
        """Wrap Lightning's ``Trainer``: its settings, and the start of its training."""
        kind: Any = module.Trainer
        changes, observer = self._changes, self._observer
        wanted: dict[str, Any] = {}
        if changes.precision is not None:
            wanted["precision"] = LIGHTNING[changes.precision]
        if changes.accumulation is not None:
            wanted["accumulate_grad_batches"] = changes.accumulation

        def make_changed(make: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
            """Create a ``Trainer`` with the wanted settings; with an observer, one that writes nothing."""
            kwargs = changes.override(kwargs, wanted)
            if observer is not None:
                given = kwargs.get("callbacks") or []
                callbacks = kept(package, [*given] if isinstance(given, list | tuple) else [given])
                quiet, batches = _quiet(observer), changes.epoch_batches
                if batches is not None:
                    # A rehearsal: a short epoch with its validation.
                    del quiet["limit_val_batches"]
                    quiet |= {"limit_train_batches": batches, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
                logger = importlib.import_module(f"{package}.loggers.logger").DummyLogger()
                kwargs |= {**quiet, "logger": logger, "callbacks": [*callbacks, self._callback(package, observer)]}
            make(trainer, *args, **kwargs)

        def fit_changed(fit: Callable[..., Any], trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            """Run ``Trainer.fit``; record the model and apply the settings to it once it is set up."""
            # Lightning calls on_fit_start once setup and configure_model have made the parts of the model.
            inner = getattr(model, "_orig_mod", model)
            own_on_fit_start = inner.on_fit_start

            def on_fit_start() -> None:
                self._take_model(trainer, inner)
                own_on_fit_start()

            inner.on_fit_start = on_fit_start
            try:
                return fit(trainer, model, *args, **kwargs)
            finally:
                del inner.on_fit_start

        around(kind, "__init__", make_changed)
        around(kind, "fit", fit_changed)
        if observer is not None:
            silence(kind, "validate", "test", "predict", "save_checkpoint", returned=[])

    def _callback(self, package: str, observer: Observer) -> Any:
        """Return a callback of this package that reports the training's start, batches and steps to ``observer``."""
        base: Any = importlib.import_module(f"{package}.callbacks").Callback
        # Without steps, in an inspection, the process ends as the training starts.
        overlay, steps = self, cast("LoopSteps", observer.steps)

        class Tells(base):  # type: ignore[misc]
            """Tells where the training, its batches and its steps begin and end."""

            _batch_asked_at = 0.0

            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                for config in trainer.lr_scheduler_configs:
                    # Not strict: a scheduler may ask for a metric of the validation, which is not run.
                    config.strict = False
                overlay._trainer = trainer
                observer.begins(overlay, trainer.train_dataloader)
                steps.begin()
                self._batch_asked_at = time.perf_counter()

            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                steps.micro_step_begins(time.perf_counter() - self._batch_asked_at, batch)

            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                # The optimizer's step contains the forward and the backward pass.
                steps.mark_both()

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                steps.micro_step_ends()
                self._batch_asked_at = time.perf_counter()

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                steps.data_is_over()

        return Tells()

    def precision(self, name: str) -> Precision | None:
        """Return the precision of the ``Trainer``; ``None`` for one that no trial has."""
        return OF_LIGHTNING.get(str(self._trainer.precision))

    def told_accumulation(self) -> tuple[AccumulatesBy | None, int]:
        """Return ``None``, for the ``Trainer``, and its accumulation; ``("script", 1)`` with manual optimization."""
        is_automatic = self._trainer.lightning_module.automatic_optimization
        return (None, self._trainer.accumulate_grad_batches) if is_automatic else ("script", 1)


def _quiet(observer: Observer) -> dict[str, Any]:
    """Return arguments with which a ``Trainer`` trains endlessly, without logging, validation and checkpoints."""
    return {
        "default_root_dir": observer.output_dir,
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
        **({"accelerator": "cpu"} if observer.on_cpu else {}),
    }


def kept(package: str, callbacks: list[Any]) -> list[Any]:
    """Return the callbacks to keep in a trial: the user's own, and Lightning's that only compute."""
    known = importlib.import_module(f"{package}.callbacks")
    left_out = tuple(getattr(known, name) for name in _LEFT_OUT if hasattr(known, name))
    # LightningCLI adds one that writes the configuration into the logger's folder.
    saves_config = getattr(sys.modules.get(f"{package}.cli"), "SaveConfigCallback", None)
    left_out += () if saves_config is None else (saves_config,)
    return [callback for callback in callbacks if not isinstance(callback, left_out)]


class FabricOverlay(Overlay):
    """Changes every ``Fabric`` that is made in this process, and records its models and its precision."""

    framework = "fabric"
    known_options: ClassVar = {
        "precision": ("--precision",),
        "workers": ("--num_workers", "--dataloader_num_workers", "--workers"),
    }
    _precision = "32-true"
    """Lightning's name for the precision of the ``Fabric`` that was made last."""

    def install(self) -> None:
        """Wrap ``Fabric`` once it is imported, from either package."""
        for package in ("lightning.fabric", "lightning_fabric"):
            on_import(f"{package}.fabric", self._wrap)

    def _wrap(self, module: ModuleType) -> None:
        """Wrap the class ``Fabric`` of a module, so that each instance gets the candidate's precision.

        With an observer it also gets one device and no loggers, and saves nothing.
        """
        kind: Any = module.Fabric
        changes, observer = self._changes, self._observer
        wanted = {} if changes.precision is None else {"precision": LIGHTNING[changes.precision]}
        quiet: dict[str, Any] = {}
        if observer is not None:
            quiet = {"devices": 1, "num_nodes": 1, "loggers": None}
            if observer.on_cpu:
                quiet["accelerator"] = "cpu"
            silence(kind, "save", "log", "log_dict")
            self._observe_batches((module._FabricDataLoader,))

        def make_changed(make: Callable[..., None], fabric: Any, **options: Any) -> None:
            make(fabric, **{**changes.override(options, wanted), **quiet})
            self._precision = fabric._precision.precision

        around(kind, "__init__", make_changed)
        for name in ("setup", "setup_module"):
            before(kind, name, self._take_model)

    def precision(self, name: str) -> Precision | None:
        """Return the precision of the latest ``Fabric``; ``None`` for one that no trial has."""
        return OF_LIGHTNING.get(self._precision)
