"""Find out what a script with a Lightning ``Trainer`` trains with, when its training begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from autotune.core.candidate import Precision
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import ModelFacts
from autotune.core.jobs import InspectionWork
from autotune.core.training_source import TrainingSource
from autotune.worker.user.fake_steps import LightningStep, add_memory
from autotune.worker.user.inspection import facts_of_script
from autotune.worker.user.lightning_trial import LightningOverlay
from autotune.worker.user.script_options import watch_options

_NAMES: dict[str, Precision] = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
# Those with a dot are LightningCLI's.
_OPTIONS = {
    "batch": ("--batch_size", "--batch-size", "--train_batch_size", "--data.batch_size", "--model.batch_size"),
    "accumulation": ("--accumulate_grad_batches", "--trainer.accumulate_grad_batches"),
    "precision": ("--precision", "--trainer.precision"),
    "workers": ("--num_workers", "--num-workers", "--dataloader_num_workers", "--workers", "--data.num_workers"),
}


class LightningInspection:
    """What a script is seen to train with, when its ``Trainer`` begins to."""

    def __init__(
        self,
        work: InspectionWork,
        source: TrainingSource,
        output_dir: str,
        finish: Callable[[ModelFacts], NoReturn],
        *,
        on_cpu: bool,
    ) -> None:
        self._work = work
        self._source = source
        self._finish = finish
        self._overlay = LightningOverlay(output_dir, {}, self._on_start, on_cpu=on_cpu)
        self._options = watch_options()

    def install(self) -> None:
        """Watch what the script makes."""
        self._overlay.install()

    def _on_start(self, trainer: Any, module: Any) -> None:
        precision, is_automatic = _NAMES.get(str(trainer.precision)), module.automatic_optimization
        facts = facts_of_script(
            CodeInterface("lightning", flags=self._options.flags(_OPTIONS)),
            module,
            trainer.train_dataloader,
            accumulation=trainer.accumulate_grad_batches if is_automatic else 1,
            # Weights of 16 bits are computed in without an autocast.
            precision=precision or "fp32",
            takes_accumulation=is_automatic,
            takes_precision=precision is not None,
        )
        self._finish(add_memory(self._work, facts, lambda: LightningStep(trainer, module)))
