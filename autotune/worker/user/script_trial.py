"""Run trials of unmodified scripts that train with a framework which has an adapter.

The candidate's settings are put over those of the framework, its batch over that of the training ``DataLoader``, which
the inspection found. Steps are told apart as in any loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from autotune.worker.trial.measure import micro_steps_to_run
from autotune.worker.user.adapter import Changes
from autotune.worker.user.code import run_script
from autotune.worker.user.frameworks import ADAPTERS
from autotune.worker.user.loop_steps import LoopSteps
from autotune.worker.user.loop_trial import Announced, StepsTrial


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
        self._overlay_loader(candidate.per_device_train_batch_size if "batch" in takes else None)
        self.output_dir, self.is_on_cpu = output_dir, self._device_kind == "cpu"
        self._announced: Announced | None = None
        ADAPTERS[source.framework].measure(Changes.of(source, candidate, takes, self._run, lambda _: None), self)
        run_script(source, output_dir)

    def steps(self, *, rehearses: bool) -> LoopSteps:
        """Return what is to be told of the batches and steps, after ``begins``."""
        return self._watch(self._run, rehearses=rehearses)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Give the batches of a loader, and measure from the first one on."""
        if self._announced is None:
            self._announced = Announced(self._watch(self._run), self.begins)
        return self._announced.batches(loader)  # type: ignore[no-any-return]
