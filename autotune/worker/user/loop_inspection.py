"""Find out what the user's own training loop, a function that is given a ``LoopConfig``, trains with."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from autotune.core import loop as loop_interface
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import InspectionAnswer
from autotune.core.loop import LoopConfig
from autotune.worker.facts import inspect_environment
from autotune.worker.trial.listener import StepListener
from autotune.worker.trial.training_watch import TrainingWatch
from autotune.worker.user.code import UserCodeError, enter, load_function
from autotune.worker.user.guard import Guard
from autotune.worker.user.inspection import Code, Finish, check_gradients, facts_of, problem_of
from autotune.worker.user.loader_overlay import LoaderOverlay, batch_of, with_loader
from autotune.worker.user.loop_steps import LoopSteps
from autotune.worker.user.protection import keep_run
from autotune.worker.user.samples import lengths_of_loader


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

    def begin() -> None:
        guard.lift()
        watch.begin()

    steps = LoopSteps(source.name, None, UntilFirstStep(), on_begin=begin, on_loader=loaders.append)
    try:
        enter(source)
        guard.install(code.scratch.stop_file)
        LoaderOverlay().install()
        watch.listener = steps
        watch.install()
        loop_interface.listen(steps)
        load_function(source)(config)
        raise UserCodeError(
            f"{source.name} ended without a step of an optimizer within autotune.steps",
            "go over autotune.steps(loader) in the training loop: for batch in autotune.steps(loader): …",
        )
    except BaseException as error:
        fail(error)
