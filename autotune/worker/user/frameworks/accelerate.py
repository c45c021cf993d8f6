"""Scripts whose own training loop uses accelerate's ``Accelerator``.

Precision and accumulation are put over those of the ``Accelerator`` that the script makes. An inspection finds the
training ``DataLoader``: the one whose batch came last before the first backward pass.
"""

from __future__ import annotations

import functools
import inspect as python_inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from autotune.core.candidate import OWN_OPTIM
from autotune.core.code_interface import CodeInterface
from autotune.core.inspection import ModelFacts
from autotune.space import precision_names
from autotune.worker.trial.listener import Listener
from autotune.worker.user.adapter import Changes, Inspecting, Measured
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.on_import import on_import
from autotune.worker.user.script_options import set_options, watch_options

if TYPE_CHECKING:
    from autotune.worker.user.fake_steps import Memory, OwnStep

HINT = "have it train for more steps, such as with --max_train_steps or --num_train_epochs"
# The options of transformers' and accelerate's examples, by what they decide.
_OPTIONS = {
    "batch": ("--per_device_train_batch_size", "--train_batch_size", "--batch_size"),
    "accumulation": ("--gradient_accumulation_steps",),
    "precision": ("--mixed_precision",),
    "checkpointing": ("--gradient_checkpointing", "--activation_checkpointing"),
    "workers": ("--dataloader_num_workers", "--num_workers", "--num-workers", "--workers"),
}


# More epochs or steps than any trial trains for: what comes after the training is not reached.
_MANY = 1_000_000
_SETTINGS = ("mixed_precision", "gradient_accumulation_steps", "gradient_accumulation_plugin")
GivesBatches = Callable[[Any, Callable[[], Iterator[Any]]], Iterator[Any]]
"""Gives the batches of a loader; called with the loader, and with what gives its own."""


def overlay(changes: Changes) -> None:
    """Have every ``Accelerator`` made with other settings."""
    AccelerateOverlay(changes).install()


def measure(changes: Changes, trial: Measured) -> None:
    """Do that in a trial, and tell it of the steps."""
    from autotune.worker.user.loader_overlay import key_of

    AccelerateOverlay(changes, is_quiet=True).install()
    set_options({"num_train_epochs": _MANY, "max_train_steps": _MANY})
    silence()

    def measured(loader: Any, batches: Callable[[], Iterator[Any]]) -> Any:
        is_trained_with = key_of(loader) == changes.interface.loader_key
        return trial.batches(_Iterable(batches)) if is_trained_with else batches()

    give_batches(measured)


def inspect(inspecting: Inspecting) -> Callable[[], bool]:
    """Look at what the script trains with, up to its second step."""
    inspection = AccelerateInspection(inspecting)
    inspection.install()
    return inspection.is_at_work


class _Iterable:
    """A loader by what gives its batches."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


class AccelerateOverlay:
    """What is put over every ``Accelerator`` that is made in this process, and seen of it."""

    def __init__(self, changes: Changes, *, is_quiet: bool = False, on_call: Callable[[], None] | None = None) -> None:
        self._changes = changes
        self._is_quiet = is_quiet
        """Whether nothing is tracked."""
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
        """Wrap the class for the rest of this process, once it is imported."""
        accumulation = self._changes.accumulation
        if accumulation is not None and self._changes.interface.accumulates_by == "option":
            set_options({"gradient_accumulation_steps": accumulation})
        on_import("accelerate.accelerator", self._wrap)

    def _wrap(self, module: ModuleType) -> None:
        kind: Any = module.Accelerator
        self._wrap_making(kind)
        self._wrap_preparing(kind)
        accumulate = kind.accumulate

        @functools.wraps(accumulate)
        def watched(accelerator: Any, *models: Any) -> Any:
            self.accumulates = True
            return accumulate(accelerator, *models)

        kind.accumulate = watched

    def _wrap_making(self, kind: Any) -> None:
        make = kind.__init__
        signature = python_inspect.signature(make)

        @functools.wraps(make)
        def __init__(accelerator: Any, *words: Any, **options: Any) -> None:  # noqa: N807
            from autotune.worker.user.loader_overlay import line_of_maker

            given = signature.bind(accelerator, *words, **options)
            self.made_at = line_of_maker()
            self.passed = {name for name in _SETTINGS if given.arguments.get(name) is not None}
            given.arguments.update(self._wanted(given.arguments))
            make(*given.args, **given.kwargs)
            self.accelerator = accelerator

        kind.__init__ = __init__

    def _wanted(self, given: Mapping[str, Any]) -> dict[str, Any]:
        changes, wanted = self._changes, dict[str, Any]()
        if changes.precision is not None:
            wanted["mixed_precision"] = precision_names.ACCELERATE[changes.precision]
        if changes.accumulation is not None:
            plugin = given.get("gradient_accumulation_plugin")
            if plugin is None:
                wanted["gradient_accumulation_steps"] = changes.accumulation
            else:
                plugin.num_steps = changes.accumulation
        return {**changes.over(given, wanted), **({"log_with": None} if self._is_quiet else {})}

    def _wrap_preparing(self, kind: Any) -> None:
        prepare, prepare_loader = kind.prepare, kind.prepare_data_loader

        @functools.wraps(prepare)
        def watched(accelerator: Any, *things: Any, **options: Any) -> Any:
            torch = sys.modules["torch"]
            for thing in things:
                if isinstance(thing, torch.nn.Module):
                    self.models.append(thing)
                    self._changes.apply_to(thing)
                    if self._on_training_call is not None:
                        thing.register_forward_pre_hook(self._on_call, with_kwargs=True)
                elif isinstance(thing, torch.optim.Optimizer):
                    self.optimizers.append(thing)
            return prepare(accelerator, *things, **options)

        @functools.wraps(prepare_loader)
        def known(accelerator: Any, loader: Any, *words: Any, **options: Any) -> Any:
            from autotune.worker.user.loader_overlay import keep_key

            prepared = prepare_loader(accelerator, loader, *words, **options)
            keep_key(prepared, loader)
            return prepared

        kind.prepare, kind.prepare_data_loader = watched, known

    def _on_call(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.arguments = None if given else set(named)
        if self._on_training_call is not None and model.training and sys.modules["torch"].is_grad_enabled():
            self._on_training_call()


def silence() -> None:
    """Have nothing tracked, saved or pushed in this process."""
    from accelerate import Accelerator
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
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    for kind in (DataLoaderShard, DataLoaderDispatcher):
        kind.__iter__ = _given_by(batches, kind.__iter__)


def _given_by(batches: GivesBatches, own: Any) -> Any:
    def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807
        return batches(loader, lambda: own(loader))

    return __iter__


class AccelerateInspection(Listener):
    """What a script is seen to train with, up to its second step; it changes nothing but what is kept quiet."""

    def __init__(self, inspecting: Inspecting) -> None:
        from autotune.worker.trial.training_watch import TrainingWatch

        self._inspecting = inspecting
        self._watch = TrainingWatch()
        self._watch.listener = self
        self._overlay = AccelerateOverlay(Changes(), is_quiet=True, on_call=self._on_call)
        self._options = watch_options()
        self._traces = inspecting.work.arms is not None and inspecting.work.arms.chip is not None
        self._given: Any = None
        self._loader: Any = None
        self._calls = 0
        """Forward passes of prepared models before the first backward pass."""
        self._passes = 0
        self._steps = 0
        self._memory: Memory | None = None

    def install(self) -> None:
        """Watch what the script makes."""
        self._overlay.install()
        give_batches(self._watched_batches)
        self._watch.install(calls=False)

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
            self._inspecting.finish(self._facts())

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
            self._inspecting.finish(self._facts())
        self._passes = 0

    def _traced(self) -> Memory | None:
        """Trace the memory of a step, before the first backward pass: no fork could compute gradients after it."""
        from autotune.worker.private.transformers import attention_of
        from autotune.worker.user.fake_steps import traced

        config = getattr(self._overlay.models[0], "config", None) if len(self._overlay.models) == 1 else None
        attention = attention_of(config) if hasattr(config, "_attn_implementation") else "sdpa"
        make = functools.partial(_traced_step, self._overlay, self._loader)
        return traced(self._inspecting.work, attention, OWN_OPTIM, make)

    def _facts(self) -> ModelFacts:
        import torch

        from autotune.worker.user.fake_steps import with_memory
        from autotune.worker.user.inspection import check_gradients, facts_of_script

        source = self._inspecting.source
        check_gradients(self._watch, source)
        accelerator, models = self._overlay.accelerator, self._overlay.models
        if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
            raise UserCodeError(
                f"{source.name} trains in {accelerator.mixed_precision}", "use bf16, fp16 or no mixed precision"
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


def _traced_step(overlay: AccelerateOverlay, loader: Any) -> OwnStep:
    """Return a step of a loop that calls its model with a batch, and takes the loss of its outputs."""
    import torch

    from autotune.worker.private.accelerate import as_it_was_made
    from autotune.worker.user.batch_shapes import NotTraceableError, of_loader
    from autotune.worker.user.fake_steps import OwnStep

    model = overlay.models[0] if len(overlay.models) == 1 else None
    if model is None or len(overlay.optimizers) != 1:
        raise NotTraceableError("it prepares another number of models and optimizers than one each")

    class AccelerateStep(OwnStep):
        """Holds the outputs of one pass until it has those of the next, as the loop does."""

        def __init__(self) -> None:
            super().__init__(as_it_was_made(overlay.accelerator, model), of_loader(loader))
            batch = self.shapes.at(1)
            if overlay.arguments is None or not isinstance(batch, Mapping) or overlay.arguments != set(batch):
                raise NotTraceableError("its loop calls the model with something else than a batch")

        def optimizer(self) -> torch.optim.Optimizer:
            """Return the script's own."""
            return self.over_fake_parameters(overlay.optimizers[0])  # type: ignore[no-any-return]

        def begin(self, batch_size: int) -> torch.optim.Optimizer:
            """Make it ready, and keep the outputs of a pass from here on."""
            optimizer = super().begin(batch_size)
            with torch.no_grad():
                self._held = self.model(**self.batch(batch_size))
            return optimizer

        def loss(self, batch: Any) -> Any:
            """Return the loss of the model's outputs."""
            outputs = self.model(**batch)
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
            if loss is None:
                raise NotTraceableError("its loop computes the loss itself")
            return loss

    return AccelerateStep()
