"""Run trials of unmodified scripts whose own training loop uses accelerate's ``Accelerator``.

The candidate's precision and accumulation are put over those of the ``Accelerator`` that the script makes, its batch
over that of the training ``DataLoader``, which an inspection finds: the one whose batch came last before the first
backward pass. Steps are told apart as in any loop.
"""

from __future__ import annotations

import functools
import inspect as python_inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

from autotune.space import precision_names
from autotune.worker.trial.measure import micro_steps_to_run
from autotune.worker.user.checkpointing import enable_checkpointing
from autotune.worker.user.code import UserCodeError, run_script
from autotune.worker.user.loader_overlay import keep_key, key_of, line_of_maker
from autotune.worker.user.loop_trial import Announced, StepsTrial
from autotune.worker.user.script_options import set_options

# More epochs or steps than any trial trains for: what comes after the training is not reached.
_MANY = 1_000_000
_SETTINGS = ("mixed_precision", "gradient_accumulation_steps", "gradient_accumulation_plugin")
GivesBatches = Callable[[Any, Callable[[], Iterator[Any]]], Iterator[Any]]
"""Gives the batches of a loader; called with the loader, and with what gives its own."""


class AccelerateTrial(StepsTrial):
    """A trial of a script that trains with an ``Accelerator``."""

    def run_code(self, output_dir: str) -> None:
        """Run the script with the candidate's settings."""
        source, candidate, interface = self._source, self._candidate, self._source.interface
        is_own = self._is_unmodified
        searched = () if is_own else interface.searched
        accumulation = candidate.gradient_accumulation_steps
        run = micro_steps_to_run(candidate, self._effort) if "accumulation" in searched else accumulation
        if run == accumulation:
            self._run_all_micro_steps()
        batch = candidate.per_device_train_batch_size if "batch" in searched else None
        self._overlay_loader(batch)
        overlay = AccelerateOverlay(
            precision=precision_names.ACCELERATE[candidate.arm.precision] if "precision" in searched else None,
            accumulation=run if "accumulation" in searched else None,
            checkpointing=candidate.arm.gradient_checkpointing if "checkpointing" in searched else False,
        )
        overlay.install()
        options = {"num_train_epochs": _MANY, "max_train_steps": _MANY}
        if "accumulation" in searched and interface.accumulates_by == "option":
            options["gradient_accumulation_steps"] = run
        set_options(options)
        silence()
        steps = Announced(self._watch(run), self.begins)

        def measured(loader: Any, batches: Callable[[], Iterator[Any]]) -> Any:
            return steps.batches(_Iterable(batches)) if key_of(loader) == interface.loader_key else batches()

        give_batches(measured)
        run_script(source, output_dir)
        raise UserCodeError(
            f"{source.name} ended before enough steps were measured",
            "have it train for more steps, such as with --max_train_steps or --num_train_epochs",
        )


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
        self.made_at = ""
        """The file and line that made it."""
        self.passed: set[str] = set()
        """Which of its settings the script passed itself, so that ``accelerate launch`` does not decide them."""
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
            self.made_at = line_of_maker()
            self.passed = {name for name in _SETTINGS if given.arguments.get(name) is not None}
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


def give_batches(batches: GivesBatches) -> None:
    """Have a function give the batches of every loader that accelerate prepared."""
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        kind.__iter__ = _given_by(batches, kind.__iter__)


def _given_by(batches: GivesBatches, own: Any) -> Any:
    def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807
        return batches(loader, lambda: own(loader))

    return __iter__
