"""Find out what a script with an ``Accelerator`` trains with, from its first two steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import torch

from autotune.core.candidate import OWN_OPTIM
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import ModelFacts
from autotune.core.jobs import InspectionWork
from autotune.core.training_source import TrainingSource
from autotune.worker.private.transformers import attention_of
from autotune.worker.trial.training_watch import Listener, TrainingWatch
from autotune.worker.user.accelerate_trial import AccelerateOverlay, give_batches
from autotune.worker.user.batch_shapes import NotTraceableError
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.fake_steps import AccelerateStep, Memory, traced, with_memory
from autotune.worker.user.inspection import check_gradients, facts_of_script
from autotune.worker.user.loader_overlay import LoaderOverlay
from autotune.worker.user.script_options import watch_options

# The options of transformers' and accelerate's examples, by what they decide.
_OPTIONS = {
    "batch": ("--per_device_train_batch_size", "--train_batch_size", "--batch_size"),
    "accumulation": ("--gradient_accumulation_steps",),
    "precision": ("--mixed_precision",),
    "checkpointing": ("--gradient_checkpointing", "--activation_checkpointing"),
    "workers": ("--dataloader_num_workers", "--num_workers", "--num-workers", "--workers"),
}


class AccelerateInspection(Listener):
    """What a script is seen to train with, up to its second step; it changes nothing but what is kept quiet."""

    def __init__(self, work: InspectionWork, source: TrainingSource, finish: Callable[[ModelFacts], NoReturn]) -> None:
        self._work = work
        self._source = source
        self._finish = finish
        """Called with the model's facts, once they are known."""
        self._watch = TrainingWatch()
        self._watch.listener = self
        self._overlay = AccelerateOverlay(on_call=self._on_call)
        self._options = watch_options()
        self._traces = work.arms is not None and work.arms.chip is not None
        self._given: Any = None
        self._loader: Any = None
        self._calls = 0
        """Forward passes of prepared models before the first backward pass."""
        self._passes = 0
        self._steps = 0
        self._memory: Memory | None = None

    def install(self) -> None:
        """Watch what the script makes."""
        LoaderOverlay().install()
        self._overlay.install()
        give_batches(self._watched_batches)
        self._watch.install()

    def is_at_work(self) -> bool:
        """Return whether the script has begun to train with an ``Accelerator``."""
        return self._given is not None

    def _watched_batches(self, loader: Any, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        for batch in batches():
            self._given = loader
            yield batch

    def _on_call(self) -> None:
        if not self.is_at_work() or self._loader is not None:
            return
        self._calls += 1
        if self._traces:
            # Nothing else is asked for, so that not even the first forward pass has to be computed.
            self._loader = self._given
            self._memory = self._traced()
            self._finish(self._facts())

    def backward_begins(self, tensors: Any) -> None:
        """Take down which loader is trained with, and count the pass."""
        if not self.is_at_work():
            return
        if self._loader is None:
            self._loader = self._given
            if self._traces:
                # The loop does not call the model that it prepared.
                self._memory = self._traced()
        self._passes += 1

    def optimizer_ends(self, optimizer: Any) -> None:
        """End the inspection once it is known how the script accumulates."""
        if self._loader is None:
            return
        self._steps += 1
        if self._overlay.accumulates or self._steps == 2:
            self._finish(self._facts())
        self._passes = 0

    def _traced(self) -> Memory | None:
        """Trace the memory of a step, before the first backward pass: no fork could compute gradients after it."""
        overlay = self._overlay
        model = overlay.models[0] if len(overlay.models) == 1 else None
        config = getattr(model, "config", None)
        attention = attention_of(config) if hasattr(config, "_attn_implementation") else "sdpa"

        def make() -> AccelerateStep:
            if model is None or len(overlay.optimizers) != 1:
                raise NotTraceableError("it prepares another number of models and optimizers than one each")
            return AccelerateStep(overlay.accelerator, model, overlay.optimizers[0], self._loader, overlay.arguments)

        return traced(self._work, attention, OWN_OPTIM, make)

    def _facts(self) -> ModelFacts:
        check_gradients(self._watch, self._source)
        accelerator, models = self._overlay.accelerator, self._overlay.models
        if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
            raise UserCodeError(
                f"{self._source.name} trains in {accelerator.mixed_precision}", "use bf16, fp16 or no mixed precision"
            )
        asked = self._options.values.get("gradient_accumulation_steps")
        by: Literal["accelerator", "option", "script"] = (
            "accelerator" if self._overlay.accumulates else "option" if asked == self._passes else "script"
        )
        is_tf32 = torch.backends.cuda.matmul.allow_tf32
        precision = accelerator.mixed_precision
        many_calls = f"its loop calls the model {self._calls} times for a backward pass"
        facts = facts_of_script(
            CodeInterface(
                "accelerate",
                accumulates_by=by,
                flags=self._options.flags(_OPTIONS),
                accelerator=os.path.basename(self._overlay.made_at),
                passed=tuple(sorted(self._overlay.passed)),
                untraceable=many_calls if self._calls > 1 else None,
            ),
            models[0] if models else None,
            self._loader,
            accumulation=accelerator.gradient_accumulation_steps if by == "accelerator" else self._passes,
            precision=precision if precision != "no" else "tf32" if is_tf32 else "fp32",
            takes_accumulation=by != "script",
            takes_precision=True,
        )
        return facts if self._memory is None else with_memory(facts, self._memory)
