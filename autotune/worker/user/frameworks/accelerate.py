"""Scripts whose own training loop uses accelerate's ``Accelerator``.

Precision and accumulation are put over those of the ``Accelerator`` that the script makes. An inspection finds the
training ``DataLoader``: the one whose batch came last before the first backward pass.
"""

from __future__ import annotations

import inspect as python_inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from autotune.core.candidate import Precision
from autotune.space import precision_names
from autotune.worker.user.adapter import (
    Changes,
    LoopInspection,
    ScriptInspection,
    give_batches,
    measured_batches,
    silence,
)
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.script_options import set_options
from autotune.worker.wrapping import after, around, before, on_import

if TYPE_CHECKING:
    from autotune.worker.user.loop_steps import LoopSteps

# The options of transformers' and accelerate's examples, by what they decide.
_OPTIONS = {
    "precision": ("--mixed_precision",),
    "checkpointing": ("--gradient_checkpointing", "--activation_checkpointing"),
    "workers": ("--dataloader_num_workers", "--num_workers", "--workers"),
}


# More epochs or steps than any trial trains for: what comes after the training is not reached.
_MANY = 1_000_000
_SETTINGS = ("mixed_precision", "gradient_accumulation_steps", "gradient_accumulation_plugin")


def overlay(changes: Changes) -> None:
    """Have every ``Accelerator`` made with other settings."""
    AccelerateOverlay(changes).install()


def measure(changes: Changes, steps: LoopSteps, output_dir: str, *, on_cpu: bool) -> None:
    """Do that in a trial, and tell of the batches."""
    AccelerateOverlay(changes, is_quiet=True).install()
    set_options({"num_train_epochs": _MANY, "max_train_steps": _MANY})
    from accelerate import Accelerator
    from huggingface_hub import HfApi
    from transformers import PreTrainedModel
    from transformers.utils import PushToHubMixin

    # Nothing is tracked, saved or pushed.
    silence(Accelerator, "init_trackers", "log", "save_state", "save_model", "save")
    silence(PreTrainedModel, "save_pretrained")
    silence(PushToHubMixin, "push_to_hub")
    silence(HfApi, "upload_folder", "upload_file")
    around(HfApi, "create_repo", lambda _, __, repo_id, *___, **____: SimpleNamespace(repo_id=repo_id))
    give_batches(_loaders(), measured_batches(changes, steps))


def inspect(inspecting: ScriptInspection) -> Callable[[], bool]:
    """Look at what the script trains with, up to its second step."""
    return AccelerateInspection(inspecting).install()


class AccelerateOverlay:
    """What is put over every ``Accelerator`` that is made in this process, and seen of it."""

    def __init__(self, changes: Changes, *, is_quiet: bool = False) -> None:
        self._changes = changes
        self._is_quiet = is_quiet
        """Whether nothing is tracked."""
        self.accelerator: Any = None
        """The one that was made last."""
        self.made_at = ""
        """The file and line that made it."""
        self.passed: set[str] = set()
        """Which of its settings the script passed itself, so that ``accelerate launch`` does not decide them."""
        self.models: list[Any] = []
        self.accumulates = False
        """Whether the script's steps are divided by ``Accelerator.accumulate``."""

    def install(self) -> None:
        """Wrap the class for the rest of this process, once it is imported."""
        on_import("accelerate.accelerator", self._wrap)

    def _wrap(self, module: ModuleType) -> None:
        from autotune.worker.user.loader_overlay import keep_key, line_of_maker

        kind: Any = module.Accelerator
        signature = python_inspect.signature(kind.__init__)

        def made(make: Callable[..., None], accelerator: Any, *words: Any, **options: Any) -> None:
            given = signature.bind(accelerator, *words, **options)
            self.made_at = line_of_maker()
            self.passed = {name for name in _SETTINGS if given.arguments.get(name) is not None}
            given.arguments.update(self._wanted(given.arguments))
            make(*given.args, **given.kwargs)
            self.accelerator = accelerator

        around(kind, "__init__", made)
        before(kind, "prepare", self._on_prepare)
        before(kind, "accumulate", lambda *_: setattr(self, "accumulates", True))

        def keep(prepared: Any, _: Any, /, data_loader: Any, *__: Any, **___: Any) -> None:
            # It is a loader, and goes over another one that it has made.
            for made_of_it in (prepared, getattr(prepared, "base_dataloader", prepared)):
                keep_key(made_of_it, data_loader)

        after(kind, "prepare_data_loader", keep)

    def _wanted(self, given: Mapping[str, Any]) -> dict[str, Any]:
        changes, wanted = self._changes, dict[str, Any]()
        if changes.precision is not None:
            wanted["mixed_precision"] = precision_names.ACCELERATE[changes.precision]
        # A script that counts its batches itself divides its losses itself, too.
        if changes.accumulation is not None and changes.interface.accumulates_by == "accelerator":
            plugin = given.get("gradient_accumulation_plugin")
            said = given.get("gradient_accumulation_steps", 1) if plugin is None else plugin.num_steps
            if said != changes.accumulation:
                changes.overrules(said)
            if plugin is None:
                wanted["gradient_accumulation_steps"] = changes.accumulation
            else:
                plugin.num_steps = changes.accumulation
        return {**changes.over(given, wanted), **({"log_with": None} if self._is_quiet else {})}

    def _on_prepare(self, _: Any, *things: Any, **__: Any) -> None:
        torch = sys.modules["torch"]
        for thing in things:
            if isinstance(thing, torch.nn.Module):
                self.models.append(thing)
                self._changes.apply_to(thing)


def _loaders() -> tuple[type, ...]:
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    return DataLoaderShard, DataLoaderDispatcher


class AccelerateInspection(LoopInspection):
    """What a script is seen to train with, up to its second step; it changes nothing but what is kept quiet."""

    framework, known_options = "accelerate", _OPTIONS

    def __init__(self, inspecting: ScriptInspection) -> None:
        super().__init__(inspecting)
        self.overlay = AccelerateOverlay(Changes(), is_quiet=True)
        give_batches(_loaders(), self.batches)

    def precision(self) -> Precision:
        """Return that of the ``Accelerator``; raises ``UserCodeError`` for one that no trial has."""
        precision: Any = self.overlay.accelerator.mixed_precision
        if precision not in ("no", "bf16", "fp16"):
            raise UserCodeError(
                f"{self.inspecting.source.name} trains in {precision}", "use bf16, fp16 or no mixed precision"
            )
        return "fp32" if precision == "no" else precision

    def told_accumulation(self) -> int | None:
        """Return that of the ``Accelerator``, where the script divides its steps by ``Accelerator.accumulate``."""
        overlay = self.overlay
        return overlay.accelerator.gradient_accumulation_steps if overlay.accumulates else None

    def interface(self) -> dict[str, Any]:
        """Return where the ``Accelerator`` is made, and with which settings of the script's own."""
        return {
            "accelerator": os.path.basename(self.overlay.made_at),
            "passed": tuple(sorted(self.overlay.passed)),
        }
