"""Run the user's code up to the training of its ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from transformers import Trainer

from autotune.core.candidate import Document
from autotune.core.training_source import TrainingSource
from autotune.worker.user.code import UserCodeError, load_function, run_script

OnTrain = Callable[[Any, Callable[[], Any]], NoReturn]


def intercept(on_train: OnTrain) -> None:
    """Have every ``Trainer``'s training call ``on_train`` with what would have trained, in this process from now on."""
    original = Trainer.train

    def train(trainer: Any, *_: Any, **__: Any) -> NoReturn:
        on_train(trainer, lambda: original(trainer))

    Trainer.train = train


def run_source(source: TrainingSource, overrides: Document, output_dir: str) -> NoReturn:
    """Run the user's code up to and into its training; raises where it ends or fails before that."""
    if source.kind == "build":
        build_trainer(source, overrides).train()
        raise UserCodeError(f"the Trainer of {source.name} has a train method that never calls Trainer.train")
    try:
        run_script(source, output_dir)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    raise UserCodeError(
        f"{source.name} ended without having trained",
        "give it the options with which it trains, such as --do_train; what is measured trains with "
        "transformers.Trainer, an Accelerator or Lightning",
    )


def build_trainer(source: TrainingSource, overrides: Document) -> Any:
    """Call the user's function and return its ``Trainer``; raises ``UserCodeError`` where it returns anything else."""

    refusals: list[UserCodeError] = []

    def train(*_: Any, **__: Any) -> NoReturn:
        refusals.append(UserCodeError(f"{source.name} calls train itself", "have it return the Trainer untrained"))
        raise refusals[0]

    intercepted, Trainer.train = Trainer.train, train
    try:
        trainer = load_function(source)(dict(overrides))
    finally:
        Trainer.train = intercepted
    if refusals:
        # The function caught it.
        raise refusals[0]
    if not isinstance(trainer, Trainer):
        kind = "the class" if isinstance(trainer, type) else "an object of type"
        name = trainer.__name__ if isinstance(trainer, type) else type(trainer).__name__
        if name == "Trainer":
            name = f"{trainer.__module__}.{name}"
        raise UserCodeError(
            f"{source.name} returned {'None' if trainer is None else f'{kind} {name}'}, not a transformers.Trainer",
            "return the Trainer, ready to train",
        )
    return trainer


def ignored_message(source: TrainingSource, ignored: str) -> str:
    """Return what is wrong with code whose ``Trainer`` does not have the settings that it was given."""
    if source.kind == "build":
        return f"{source.name} ignored its overrides: {ignored}; pass them all on to its TrainingArguments"
    return (
        f"{source.name} changes its TrainingArguments after they were made: {ignored}; leave that to the command line"
    )
