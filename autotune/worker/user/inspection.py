"""Report which model and data the user's own code trains with, or why that could not be found."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from autotune.core import loop as loop_interface
from autotune.core.candidate import OWN_OPTIM, Arm
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import Inspection, ModelFacts, OwnSettings
from autotune.core.launch_command import ALONE
from autotune.core.loop import LoopConfig
from autotune.core.messages import InspectionWork, Problem
from autotune.core.scratch import Scratch
from autotune.core.training_source import TrainingSource
from autotune.core.workload import DTYPES, DTypeName
from autotune.worker.checkpointing import checkpointing_parts, is_checkpointing
from autotune.worker.facts import inspect_environment
from autotune.worker.failures import first_line
from autotune.worker.private.transformers import attention_of
from autotune.worker.trial.step_checks import NO_GRADIENTS, NO_GRADIENTS_HINT
from autotune.worker.trial.training_watch import Listener, StepListener, TrainingWatch
from autotune.worker.user.adapter import Changes, MakeIterator, Observer, Overlay
from autotune.worker.user.code import UserCodeError, advice_on_own_loop, enter, foreseen, load_function, watch_options
from autotune.worker.user.frameworks import OVERLAYS
from autotune.worker.user.guard import Guard
from autotune.worker.user.loader_overlay import LoaderOverlay, batch_of, is_made_by_data, key_of
from autotune.worker.user.loop_steps import LoopSteps
from autotune.worker.user.protection import keep_run
from autotune.worker.user.samples import lengths_of_loader
from autotune.worker.wrapping import module_of

Finish = Callable[[Inspection | Problem], NoReturn]
"""Sends the facts, or why there are none, and ends the process."""


@dataclasses.dataclass(frozen=True)
class Code:
    """The user's code, the inspection that is asked for, and the job's temporary folder."""

    source: TrainingSource
    work: InspectionWork
    scratch: Scratch


def facts_of(model: Any, loader: Any) -> ModelFacts:
    """Return the facts that a search needs about a model and its training data; either may be ``None``."""
    parameters = list(model.parameters()) if model is not None else []
    config: Any = getattr(model, "config", None)
    document = config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}
    document = json.loads(json.dumps(document, default=str))  # A config may hold objects that JSON does not know.
    return ModelFacts(
        type(model).__name__ if model is not None else "no torch.nn.Module",
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        # Models without a configured attention are taken as sdpa.
        (attention_of(config) if hasattr(config, "_attn_implementation") else "sdpa",),
        dataloader_num_workers=getattr(loader, "num_workers", 0),
        dtype=weight_dtype(model) if parameters else "float32",
        samples=length(getattr(loader, "dataset", None)),
        # Without the model's path and the version of transformers.
        config={
            name: value for name, value in document.items() if name not in ("_name_or_path", "transformers_version")
        },
    )


def _with_loader(interface: CodeInterface, loader: Any) -> CodeInterface:
    """Return an interface completed by the training loader: where it is made, how it loads, its samples' lengths.

    Loading of data without a length cannot be tuned, since each worker might load all of it.
    """
    key = key_of(loader)
    return dataclasses.replace(
        interface,
        loader_key=key,
        loader=os.path.basename(key.rpartition("#")[0]) if key else None,
        loader_workers=getattr(loader, "num_workers", 0),
        loader_prefetch=getattr(loader, "prefetch_factor", None),
        tunes_loader=key is not None and hasattr(getattr(loader, "dataset", None), "__len__"),
        lengths=lengths_of_loader(loader),
    )


def check_gradients(watch: TrainingWatch, source: TrainingSource) -> None:
    """Raise ``UserCodeError`` where optimizers stepped but no parameter had a gradient."""
    if watch.trained is not None and not watch.has_gradients:
        raise UserCodeError(NO_GRADIENTS.format(source.name), NO_GRADIENTS_HINT)


def problem_of(error: BaseException, source: TrainingSource) -> Problem:
    """Return why the user's code could not be inspected, and advice; print the traceback of its own errors."""
    # Without the variables by which torchrun tells a process its rank, torch or the code raises these errors.
    modules = [module_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    asks_for_rank = isinstance(error, ValueError) and modules[-1:] == ["torch.distributed.rendezvous"]
    if isinstance(error, KeyError):
        asks_for_rank = error.args[:1] != () and error.args[0] in ALONE
    if source.is_ranked and asks_for_rank:
        message = f"{source.name} asks what torchrun tells a process, and is told so where its batch is a placeholder"
        return Problem(message, advice_on_own_loop(source))
    error = foreseen(error, source)
    if isinstance(error, UserCodeError):
        return Problem(str(error), error.hint)
    sys.excepthook(type(error), error, error.__traceback__)
    return Problem(f"{source.name} raised {first_line(error)}", "fix it until it trains by itself")


def weight_dtype(model: Any) -> DTypeName:
    """Return the dtype of most weights, among the dtypes in ``DTYPES``."""
    counts = Counter[str]()
    for parameter in model.parameters():
        counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return max(DTYPES, key=counts.__getitem__)


def length(dataset: Any) -> int | None:
    """Return the number of samples; ``None`` for data that has no length."""
    try:
        return len(dataset)
    except TypeError:
        return None


class LoopInspection(Observer, Listener):
    """Finds the model, loader and settings of a script's training, on any framework, and ends the process with them.

    A framework with a loop of its own reports when its loop begins. In any other loop, the training loader is the one
    whose batch came last before the first backward pass, and the second step shows the accumulation.
    """

    def __init__(self, code: Code, output_dir: str, finish: Callable[[ModelFacts], NoReturn]) -> None:
        super().__init__(output_dir, on_cpu=code.work.devices.kind == "cpu")
        self._code, self._finish = code, finish
        self._options = watch_options()
        self._last_loader: tuple[Overlay, Any] | None = None
        """Framework and loader of the last batch; ``None`` before the first batch."""
        self._training_loader: tuple[Overlay, Any] | None = None
        """Framework and loader of the training; ``None`` before its first backward pass."""
        self._step_count = self._passes_in_step = 0
        self._watch = TrainingWatch()
        self._watch.listener = self

    def install(self) -> None:
        """Watch the script's loaders, frameworks and training steps from now on."""
        LoaderOverlay().install()
        for kind in OVERLAYS.values():
            kind(Changes(), self).install()
        self._watch.install(calls=False)

    def is_at_work(self) -> bool:
        """Return whether a framework's loader has given a batch, so that this inspection sees the training."""
        return self._last_loader is not None

    def batches(self, overlay: Overlay, loader: Any, make_iterator: MakeIterator) -> Iterator[Any]:
        """Yield the batches of a loader, and record the loader as the one of the last batch."""
        for batch in make_iterator():
            self._last_loader = overlay, loader
            if self._code.work.arms is not None:
                # This process was started to trace a Trainer, and the script uses none.
                self._finish(facts_of(None, loader))
            yield batch

    def begins(self, overlay: Overlay, loader: Any) -> None:
        """End the inspection when a framework's loop begins, since everything is known."""
        self._finish_with(overlay, loader)

    def backward_begins(self, tensors: Any) -> None:
        """Record that the training uses the loader of the last batch, and count the backward pass."""
        self._training_loader = self._training_loader or self._last_loader
        self._passes_in_step += self.is_at_work()

    def optimizer_ends(self, optimizer: Any) -> None:
        """End the inspection once the script's accumulation is known: at the latest from the second step's passes."""
        if self._training_loader is None:
            return
        self._step_count += 1
        # No second step is needed where the framework was told the accumulation.
        if self._training_loader[0].told_accumulation() is not None or self._step_count == 2:
            self._finish_with(*self._training_loader)
        self._passes_in_step = 0

    def _finish_with(self, overlay: Overlay, loader: Any) -> NoReturn:
        """End the process with the facts of the training, its own settings, and which settings a trial can replace.

        Raises ``UserCodeError`` where the loader does not decide the batch, or no parameter had a gradient.
        """
        source, model = self._code.source, next(iter(overlay.models), None)
        check_gradients(self._watch, source)
        is_option = "accumulation" in self._options.flags({}, {"accumulation": self._passes_in_step})
        # What sets the accumulation, and its value. Without an option for it, the script itself does.
        by, accumulation = overlay.told_accumulation() or ("option" if is_option else "script", self._passes_in_step)
        batch, precision = batch_of(loader), overlay.precision(source.name)
        obstacle = None
        if is_made_by_data(loader):
            obstacle = "takes one item of its data at a time, whatever its batch_size is"
        elif loader is not None and batch is None:
            obstacle = "has no batch size"
        if obstacle is not None:
            message = f"the DataLoader of {source.name} {obstacle}: its data make the batches"
            raise UserCodeError(message, advice_on_own_loop(source))
        can_checkpoint = model is not None and bool(checkpointing_parts(model))
        checkpoints = model is not None and is_checkpointing(model)
        can_replace = {
            "batch": key_of(loader) is not None and batch is not None,
            "accumulation": by != "script",
            "precision": precision is not None,
            "checkpointing": can_checkpoint and not checkpoints,
        }
        interface = CodeInterface(
            overlay.framework,
            tuple(setting for setting, can in can_replace.items() if can),
            accumulates_by=by,
            flags=self._options.flags(overlay.known_options, {"batch": batch, "accumulation": accumulation}),
            **overlay.interface(),
        )
        is_tf32 = torch.backends.cuda.matmul.allow_tf32 and precision == "fp32"
        facts = facts_of(model, loader)
        # A precision of ``None`` is one that no trial sets, such as 16-bit weights without an autocast.
        arm = Arm("tf32" if is_tf32 else precision or "fp32", checkpoints, facts.attn_implementations[0], OWN_OPTIM)
        self._finish(
            dataclasses.replace(
                facts,
                gradient_checkpointing=can_checkpoint,
                always_checkpoints=checkpoints,
                interface=_with_loader(interface, loader),
                own=OwnSettings(arm, batch, accumulation),
            )
        )


def inspect_loop(code: Code, finish: Finish) -> NoReturn:
    """Run the user's loop function until its first step; report its model, data and what it reads of the config."""
    source, environment = code.source, inspect_environment()
    config, watch = LoopConfig(), TrainingWatch()
    loaders: list[Any] = []

    def fail(error: BaseException) -> NoReturn:
        finish(problem_of(error, source))

    class UntilFirstStep(StepListener):
        """Ends the process at the first step, with the facts of the model, the loader and the config."""

        def step_ends(self, *_: Any) -> NoReturn:
            check_gradients(watch, source)
            loader = loaders[0] if loaders else None
            searched = tuple(setting for setting, name in loop_interface.FIELDS.items() if name in config.was_read)
            interface = CodeInterface("loop", searched, loader_batch=batch_of(loader))
            model = dataclasses.replace(
                facts_of(watch.model, loader),
                gradient_checkpointing="checkpointing" in searched,
                interface=_with_loader(interface, loader),
            )
            keep_run()
            finish(dataclasses.replace(environment, model=model))

        # A step with fewer samples shows the same facts.
        step_is_dropped = step_ends

    guard = Guard(source, fail)

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
