"""Report which model and data the user's own code trains with, or why that could not be found."""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from autotune.core import loop as loop_interface
from autotune.core.candidate import OWN_OPTIM, Precision
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import InspectionAnswer, ModelFacts, OwnSettings
from autotune.core.jobs import InspectionWork
from autotune.core.launch_command import ALONE
from autotune.core.loop import LoopConfig
from autotune.core.messages import Problem
from autotune.core.scratch import Scratch
from autotune.core.training_source import TrainingSource
from autotune.core.workload import DTYPES, DTypeName
from autotune.worker.checkpointing import checkpointing_parts, is_checkpointing
from autotune.worker.facts import inspect_environment
from autotune.worker.failures import first_line
from autotune.worker.private.transformers import attention_of
from autotune.worker.stack import module_of
from autotune.worker.trial.listener import StepListener
from autotune.worker.trial.step_checks import NO_GRADIENTS, NO_GRADIENTS_HINT
from autotune.worker.trial.training_watch import TrainingWatch
from autotune.worker.user.code import UserCodeError, enter, foreseen, load_function, trim
from autotune.worker.user.guard import Guard
from autotune.worker.user.loader_overlay import LoaderOverlay, batch_of, is_made_by_data, key_of, with_loader
from autotune.worker.user.loop_steps import LoopSteps
from autotune.worker.user.protection import keep_run
from autotune.worker.user.samples import lengths_of_loader
from autotune.worker.user.script_options import next_step

Finish = Callable[[InspectionAnswer], NoReturn]
"""Sends the answer, and ends the process."""


@dataclasses.dataclass(frozen=True)
class Code:
    """The user's code, and what is asked of it."""

    source: TrainingSource
    work: InspectionWork
    scratch: Scratch


def facts_of(model: Any, loader: Any) -> ModelFacts:
    """Return what a search needs to know of a model and its training data; either may be ``None``."""
    parameters = list(model.parameters()) if model is not None else []
    config: Any = getattr(model, "config", None)
    document = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    document = json.loads(json.dumps(document, default=str))
    return ModelFacts(
        type(model).__name__ if model is not None else "no torch.nn.Module",
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        # Said only where the model names one.
        (attention_of(config) if hasattr(config, "_attn_implementation") else "sdpa",),
        dataloader_num_workers=getattr(loader, "num_workers", 0),
        dtype=weight_dtype(model) if parameters else "float32",
        samples=length(getattr(loader, "dataset", None)),
        # Without its path and version; empty where there is none.
        config={
            name: value for name, value in document.items() if name not in ("_name_or_path", "transformers_version")
        },
    )


def facts_of_script(
    source: TrainingSource,
    interface: CodeInterface,
    model: Any,
    loader: Any,
    *,
    accumulation: int,
    precision: Precision,
    takes_accumulation: bool,
    takes_precision: bool,
) -> ModelFacts:
    """Return the facts of what a script trains, its own settings, and which of them a trial can replace.

    ``accumulation`` and ``precision`` are the script's own. ``interface`` is what else is known of how it takes them.
    Raises ``UserCodeError`` where the loader does not decide the batch.
    """
    facts, batch = facts_of(model, loader), batch_of(loader)
    is_made = is_made_by_data(loader)
    is_unknown = loader is not None and batch is None and interface.fixed.batch is None
    if is_made or is_unknown:
        takes = "takes one item of its data at a time, whatever its batch_size is" if is_made else "has no batch size"
        raise UserCodeError(
            f"the DataLoader of {source.name} {takes}: its data make the batches",
            next_step(source),
        )
    can_checkpoint = model is not None and bool(checkpointing_parts(model))
    own_checkpointing = model is not None and is_checkpointing(model)
    interface = dataclasses.replace(with_loader(interface, loader), lengths=lengths_of_loader(loader))
    can_replace = {
        "batch": key_of(loader) is not None and batch is not None,
        "accumulation": takes_accumulation,
        "precision": takes_precision,
        "checkpointing": can_checkpoint and not own_checkpointing,
    }
    return dataclasses.replace(
        facts,
        gradient_checkpointing=can_checkpoint,
        always_checkpoints=own_checkpointing,
        interface=dataclasses.replace(interface, searched=tuple(what for what, can in can_replace.items() if can)),
        own=OwnSettings(OWN_OPTIM, batch, accumulation, precision, own_checkpointing, facts.attn_implementations[0]),
    )


def check_gradients(watch: TrainingWatch, source: TrainingSource) -> None:
    """Raise ``UserCodeError`` where optimizers stepped, and none had anything to do."""
    if watch.trained is not None and not watch.has_gradients:
        raise UserCodeError(NO_GRADIENTS.format(source.name), NO_GRADIENTS_HINT)


def problem_of(error: BaseException, source: TrainingSource) -> Problem:
    """Return what kept the user's code from being inspected; the log gets the traceback of an error of theirs."""
    # For want of the variables by which torchrun tells a process its rank.
    modules = [module_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    asks_for_rank = isinstance(error, ValueError) and modules[-1:] == ["torch.distributed.rendezvous"]
    if isinstance(error, KeyError):
        asks_for_rank = error.args[:1] != () and error.args[0] in ALONE
    if source.is_ranked and asks_for_rank:
        asked = f"{source.name} asks what torchrun tells a process, and is told so where its batch is a placeholder"
        return Problem(asked, next_step(source))
    trim(error, source)
    error = foreseen(error, source)
    if isinstance(error, UserCodeError):
        return Problem(str(error), error.hint)
    sys.excepthook(type(error), error, error.__traceback__)
    return Problem(f"{source.name} raised {first_line(error)}", "fix it until it trains by itself")


def weight_dtype(model: Any) -> DTypeName:
    """Return the dtype of most of the weights, among those that weights are trained in."""
    counts = dict.fromkeys(DTYPES, 0)
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        if name in counts:
            counts[name] += parameter.numel()
    return max(counts, key=lambda name: counts[name])


def length(dataset: Any) -> int | None:
    """Return the number of samples; ``None`` for data that has no length."""
    try:
        return len(dataset)
    except TypeError:
        return None


def inspect_loop(code: Code, finish: Finish) -> NoReturn:
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
