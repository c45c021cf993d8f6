"""Run trials of unmodified scripts whose own training loop uses accelerate's ``Accelerator``.

The candidate's precision and accumulation are put over those of the ``Accelerator`` that the script makes, its batch
over that of the training ``DataLoader``, which an inspection finds: the one whose batch came last before the first
backward pass. Steps are told apart as in any loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect as python_inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

from autotune.core.candidate import OWN_OPTIM
from autotune.core.inspection import ModelFacts, OwnSettings
from autotune.core.jobs import InspectionWork
from autotune.core.training_source import TrainingSource
from autotune.worker.private.transformers import attention_of
from autotune.worker.trial.measure import micro_steps_to_run
from autotune.worker.user.batch_shapes import NotTraceableError
from autotune.worker.user.checkpointing import checkpointing_parts, enable_checkpointing, is_checkpointing
from autotune.worker.user.code import UserCodeError, run_script
from autotune.worker.user.fake_steps import AccelerateStep, Memory, traced, with_memory
from autotune.worker.user.guard import watch_steps
from autotune.worker.user.inspection import SeenGradients, SeenTraining
from autotune.worker.user.loader_overlay import LoaderOverlay, batch_of, keep_key, key_of, loading_of
from autotune.worker.user.loop_trial import StepsTrial

# More epochs or steps than any trial trains for: what comes after the training is not reached.
_MANY = 1_000_000
_PRECISIONS = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}

# The options of transformers' and accelerate's examples, by what they decide.
OPTIONS = {
    "batch": ("--per_device_train_batch_size", "--train_batch_size", "--batch_size"),
    "accumulation": ("--gradient_accumulation_steps",),
    "precision": ("--mixed_precision",),
    "checkpointing": ("--gradient_checkpointing", "--activation_checkpointing"),
    "workers": ("--dataloader_num_workers", "--num_workers", "--num-workers", "--workers"),
}


class AccelerateTrial(StepsTrial):
    """A trial of a script that trains with an ``Accelerator``."""

    def run_code(self, output_dir: str) -> None:
        """Run the script with the candidate's settings."""
        source, candidate, interface = self._source, self._candidate, self._source.interface
        is_own = self._is_unmodified
        searched = () if is_own else interface["searched"]
        accumulation = candidate.gradient_accumulation_steps
        run = micro_steps_to_run(candidate, self._effort) if "accumulation" in searched else accumulation
        if run == accumulation:
            self._run_all_micro_steps()
        batch = candidate.per_device_train_batch_size if "batch" in searched else None
        self._overlay_loader(batch)
        overlay = AccelerateOverlay(
            precision=_PRECISIONS[candidate.arm.precision] if "precision" in searched else None,
            accumulation=run if "accumulation" in searched else None,
            checkpointing=candidate.arm.gradient_checkpointing if "checkpointing" in searched else False,
        )
        overlay.install()
        options = {"num_train_epochs": _MANY, "max_train_steps": _MANY}
        if "accumulation" in searched and interface.get("accumulates_by") == "option":
            options["gradient_accumulation_steps"] = run
        _set_options(options)
        silence()
        steps = self._watch(run)
        self._announce = self.begins
        _over_loaders(lambda loader, batches: self._measured_batches(steps, loader, batches))
        run_script(source, output_dir)
        raise UserCodeError(
            f"{source.name} ended before enough steps were measured",
            "have it train for more steps, such as with --max_train_steps or --num_train_epochs",
        )

    def _measured_batches(self, steps: Any, loader: Any, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if key_of(loader) != self._source.interface["loader_key"]:
            return batches()
        if not self._has_begun:
            self._has_begun = True
            self.begins()
        return steps.batches(_Iterable(batches))  # type: ignore[no-any-return]


class _Iterable:
    """A loader by what gives its batches."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


class AccelerateOverlay:
    """What is put over every ``Accelerator`` that is made in this process; ``None`` leaves the script's own."""

    def __init__(
        self,
        precision: str | None = None,
        accumulation: int | None = None,
        *,
        checkpointing: bool = False,
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        self._precision = precision
        self._accumulation = accumulation
        self._checkpointing = checkpointing
        self._on_training_call = on_call
        """Called before a forward pass that is trained with."""
        self.accelerator: Any = None
        """The one that was made last."""
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.arguments: set[str] | None = None
        """Names under which the model was given what it was called with last; ``None`` where some had none."""
        self.accumulates = False
        """Whether the script's steps are divided by ``Accelerator.accumulate``."""

    def install(self) -> None:
        """Wrap the class for the rest of this process."""
        self._wrap_making()
        self._wrap_preparing()
        accumulate = Accelerator.accumulate

        @functools.wraps(accumulate)
        def watched(accelerator: Any, *models: Any) -> Any:
            self.accumulates = True
            return accumulate(accelerator, *models)

        Accelerator.accumulate = watched

    def _wrap_making(self) -> None:
        make = Accelerator.__init__
        signature = python_inspect.signature(make)

        @functools.wraps(make)
        def __init__(accelerator: Any, *words: Any, **options: Any) -> None:  # noqa: N807
            given = signature.bind(accelerator, *words, **options)
            self._put(given.arguments)
            make(*given.args, **given.kwargs)
            self.accelerator = accelerator

        Accelerator.__init__ = __init__

    def _put(self, arguments: dict[str, Any]) -> None:
        arguments["log_with"] = None
        if self._precision is not None:
            arguments["mixed_precision"] = self._precision
        if self._accumulation is not None:
            plugin = arguments.get("gradient_accumulation_plugin")
            if plugin is None:
                arguments["gradient_accumulation_steps"] = self._accumulation
            else:
                plugin.num_steps = self._accumulation

    def _wrap_preparing(self) -> None:
        prepare, prepare_loader = Accelerator.prepare, Accelerator.prepare_data_loader

        @functools.wraps(prepare)
        def watched(accelerator: Any, *things: Any, **options: Any) -> Any:
            for thing in things:
                if isinstance(thing, torch.nn.Module):
                    self.models.append(thing)
                    thing.register_forward_pre_hook(self._on_call, with_kwargs=True)
                    if self._checkpointing:
                        enable_checkpointing(thing)
                elif isinstance(thing, torch.optim.Optimizer):
                    self.optimizers.append(thing)
            return prepare(accelerator, *things, **options)

        @functools.wraps(prepare_loader)
        def known(accelerator: Any, loader: Any, *words: Any, **options: Any) -> Any:
            prepared = prepare_loader(accelerator, loader, *words, **options)
            keep_key(prepared, loader)
            return prepared

        Accelerator.prepare, Accelerator.prepare_data_loader = watched, known

    def _on_call(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.arguments = None if given else set(named)
        if model.training and torch.is_grad_enabled():
            self._on_training_call()


def silence() -> None:
    """Have nothing tracked, saved or pushed in this process."""
    from huggingface_hub import HfApi
    from transformers import PreTrainedModel
    from transformers.utils import PushToHubMixin

    def nothing(*_: Any, **__: Any) -> None:
        return None

    for name in ("init_trackers", "log", "save_state", "save_model", "save"):
        setattr(Accelerator, name, nothing)
    PreTrainedModel.save_pretrained = nothing
    PushToHubMixin.push_to_hub = nothing

    def create_repo(_: Any, repo_id: str, *__: Any, **___: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id=repo_id)

    HfApi.create_repo = create_repo  # type: ignore[assignment, method-assign]
    for name in ("upload_folder", "upload_file"):
        setattr(HfApi, name, nothing)


def _over_loaders(batches: Callable[[Any, Callable[[], Iterator[Any]]], Iterator[Any]]) -> None:
    """Have a function give the batches of every loader that accelerate prepared; it gets the loader and its own."""
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        kind.__iter__ = _given_by(batches, kind.__iter__)


def _given_by(batches: Callable[[Any, Callable[[], Iterator[Any]]], Iterator[Any]], own: Any) -> Any:
    def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807
        return batches(loader, lambda: own(loader))

    return __iter__


def _set_options(values: dict[str, int]) -> None:
    """Have every ``argparse`` parser of this process give other values for options that it has and that are given."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(parser: Any, *words: Any, **options: Any) -> Any:
        found, others = parse(parser, *words, **options)
        for name, value in values.items():
            if getattr(found, name, None) is not None:
                setattr(found, name, value)
        return found, others

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]


class SeenOptions:
    """The options that the script's own parsers have, and what was given for them."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.values: dict[str, Any] = {}

    def watch(self) -> None:
        """Take them down from now on."""
        kind: Any = next(each for each in argparse.ArgumentParser.__mro__ if "add_argument" in vars(each))
        add, parse = kind.add_argument, argparse.ArgumentParser.parse_known_args

        @functools.wraps(add)
        def add_argument(parser: Any, *names: Any, **options: Any) -> Any:
            self.names |= {name for name in names if isinstance(name, str) and name.startswith("--")}
            return add(parser, *names, **options)

        def parse_known_args(parser: Any, *words: Any, **options: Any) -> Any:
            found, others = parse(parser, *words, **options)
            self.values |= vars(found)
            return found, others

        kind.add_argument = add_argument
        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[assignment, method-assign]

    def flags(self, options: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the flag of each thing that can be searched, where the script has one."""
        return {what: name for what, names in options.items() for name in names if name in self.names}


@functools.cache
def watch_options() -> SeenOptions:
    """Take down, from now on, which options the parsers of this process have."""
    seen = SeenOptions()
    seen.watch()
    return seen


class AccelerateInspection:
    """What a script is seen to train with, up to its second step; it changes nothing but what is kept quiet."""

    def __init__(self, work: InspectionWork, source: TrainingSource, finish: Callable[[ModelFacts], NoReturn]) -> None:
        self._work = work
        self._source = source
        self._finish = finish
        """Called with the model's facts, once they are known."""
        self._seen = SeenTraining()
        self._gradients = SeenGradients()
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
        _over_loaders(self._watched_batches)
        self._gradients.watch()
        watch_steps(torch, self._on_backward, self._on_optimizer)

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

    def _on_backward(self, _: Any) -> None:
        if not self.is_at_work():
            return
        if self._loader is None:
            self._loader = self._given
            if self._traces:
                # The loop does not call the model that it prepared.
                self._memory = self._traced()
        self._passes += 1

    def _on_optimizer(self) -> None:
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

    def _why_untraceable(self) -> dict[str, str]:
        if self._calls <= 1:
            return {}
        return {"untraceable": f"its loop calls the model {self._calls} times for a backward pass"}

    def _facts(self) -> ModelFacts:
        self._gradients.check(self._source)
        accelerator, models = self._overlay.accelerator, self._overlay.models
        if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
            raise UserCodeError(
                f"{self._source.name} trains in {accelerator.mixed_precision}", "use bf16, fp16 or no mixed precision"
            )
        self._seen.model = models[0] if models else None
        self._seen.loader = self._loader
        model, batch, key = self._seen.model, batch_of(self._loader), key_of(self._loader)
        can_checkpoint = model is not None and bool(checkpointing_parts(model))
        own_checkpointing = model is not None and is_checkpointing(model)
        asked = self._options.values.get("gradient_accumulation_steps")
        by = "accelerator" if self._overlay.accumulates else "option" if asked == self._passes else "script"
        accumulation = accelerator.gradient_accumulation_steps if by == "accelerator" else self._passes
        searched = [
            *(["batch"] if key is not None and batch is not None else []),
            *(["accumulation"] if by != "script" else []),
            "precision",
            *(["checkpointing"] if can_checkpoint and not own_checkpointing else []),
        ]
        is_tf32 = torch.backends.cuda.matmul.allow_tf32
        precision = accelerator.mixed_precision
        facts = self._seen.facts()
        facts = dataclasses.replace(
            facts,
            gradient_checkpointing=can_checkpoint,
            always_checkpoints=own_checkpointing,
            interface={
                "kind": "accelerate",
                "searched": searched,
                "accumulates_by": by,
                **loading_of(self._loader),
                "flags": self._options.flags(OPTIONS),
                **self._why_untraceable(),
            },
            own=OwnSettings(
                OWN_OPTIM,
                batch,
                accumulation,
                precision if precision != "no" else "tf32" if is_tf32 else "fp32",
                own_checkpointing,
                facts.attn_implementations[0],
            ),
        )
        return facts if self._memory is None else with_memory(facts, self._memory)
