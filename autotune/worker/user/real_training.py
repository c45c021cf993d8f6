"""Train for real with the winner of a study, in the user's own code, which is changed in nothing else.

The code is run as ``python`` would run it. Libraries are changed when it imports them, so that what it does before that
has its effect. Run with ``python -m`` by ``autotune run``, and by ``torchrun`` for each rank.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.core.loop import LoopConfig
from autotune.core.real_training import VARIABLE, RealTraining
from autotune.core.schema import decode
from autotune.space.levers import applied_settings
from autotune.space.training_arguments import linked_fields
from autotune.worker.user.adapter import Changes
from autotune.worker.user.code import load_function, run_as_main, tell_launched_precision
from autotune.worker.user.frameworks import ADAPTERS
from autotune.worker.wrapping import before, on_import


def main() -> None:
    """Train, in this process."""
    training = decode(json.loads(os.environ.pop(VARIABLE)), RealTraining)
    source = training.source
    if training.cpu_core is not None:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {training.cpu_core})
        os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, cores))
    sys.argv = [source.file, *source.argv]
    # As python does: the script's folder comes first, or the working folder for a module.
    sys.path[0] = os.getcwd() if source.module else str(Path(source.file).parent)
    _PREPARE.get(source.framework, _prepare_script)(training)
    if source.kind == "build":
        _apply(training, load_function(source)(dict(training.arguments))).train()
    elif source.kind == "loop":
        load_function(source)(LoopConfig(**training.arguments))
    else:
        run_as_main(source, source.argv)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"autotune: {text}", file=sys.stderr, flush=True)


# transformers.Trainer


def _prepare_trainer(training: RealTraining) -> None:
    if training.source.kind == "build":
        # The function is handed what it is to pass on.
        return
    tell_launched_precision(training.arguments)
    on_import("transformers.training_args", functools.partial(_set_fields, training.arguments))
    if applied_settings(training.candidate.arm):
        on_import(
            "transformers.trainer",
            lambda module: before(module.Trainer, "train", lambda trainer, *_, **__: _apply(training, trainer)),
        )


def _set_fields(wanted: Mapping[str, Any], module: ModuleType) -> None:
    """Have every ``TrainingArguments`` made with the winner's fields, and say what the script had said instead."""
    kind: Any = module.TrainingArguments
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    fields: set[str] = set()

    def put(arguments: Any) -> None:
        for name, value in {**linked_fields(wanted), **wanted}.items():
            if not hasattr(arguments, name):
                continue
            said = getattr(arguments, name)
            if said not in (value, defaults.get(name)) and name not in fields:
                fields.add(name)
                _say(f"the script says {name}={said!r}; {value!r} is set")
            setattr(arguments, name, value)

    before(kind, "__post_init__", put)


def _apply(training: RealTraining, trainer: Any) -> Any:
    if settings := applied_settings(training.candidate.arm):
        from autotune.training import apply

        apply(trainer, **settings)
    return trainer


# Other loops


def _prepare_loader(training: RealTraining, batch: int | None) -> None:
    """Have the training ``DataLoader`` made with the winner's batch and processes, where it is known."""
    arm, key = training.candidate.arm, training.source.interface.loader_key
    if key is None or (batch is None and not arm.dataloader_num_workers):
        return

    def change(_: ModuleType) -> None:
        from autotune.worker.user.loader_overlay import LoaderOverlay

        LoaderOverlay(key, batch, arm.dataloader_num_workers, arm.dataloader_prefetch_factor).install()

    # Not "torch.utils.data", which torch imports while half of it is not there yet.
    on_import("torch", change)


def _prepare_script(training: RealTraining) -> None:
    source, candidate, takes = training.source, training.candidate, training.source.interface.searched
    _prepare_loader(training, candidate.per_device_train_batch_size if "batch" in takes else None)
    changes = Changes.of(source, candidate, takes, candidate.gradient_accumulation_steps, _say)
    ADAPTERS[source.framework].overlay(changes)


_PREPARE: dict[str, Callable[[RealTraining], None]] = {
    "trainer": _prepare_trainer,
    "loop": lambda training: _prepare_loader(training, None),
    "placeholders": lambda training: None,
}

if __name__ == "__main__":
    main()
