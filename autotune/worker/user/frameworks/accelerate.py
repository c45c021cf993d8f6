"""Scripts whose own training loop uses accelerate's ``Accelerator``.

Precision and accumulation replace those of the ``Accelerator`` that the script makes. An inspection finds the
training ``DataLoader``: the one whose batch came last before the first backward pass.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from autotune.core.candidate import Precision
from autotune.space.levers import ACCELERATE
from autotune.worker.user.adapter import AccumulatesBy, Overlay, silence
from autotune.worker.user.code import UserCodeError, set_options
from autotune.worker.wrapping import after, around, before, on_import

# More epochs or steps than any trial trains for: what comes after the training is not reached.
_MANY = 1_000_000
_SETTINGS = ("mixed_precision", "gradient_accumulation_steps", "gradient_accumulation_plugin")


class AccelerateOverlay(Overlay):
    """Changes every ``Accelerator`` that is made in this process, and records what the script does with it."""

    framework = "accelerate"
    # The options of transformers' and accelerate's examples.
    known_options: ClassVar = {
        "precision": ("--mixed_precision",),
        "checkpointing": ("--gradient_checkpointing", "--activation_checkpointing"),
        "workers": ("--dataloader_num_workers", "--num_workers", "--workers"),
    }
    _accelerator: Any = None
    """The ``Accelerator`` that was made last."""
    _made_at = ""
    """The file and line that made it."""
    _passed: frozenset[str] = frozenset()
    """Which of its settings the script passed itself, so that ``accelerate launch`` does not decide them."""
    _accumulates = False
    """Whether the script has called ``Accelerator.accumulate``."""

    def install(self) -> None:
        """Wrap ``Accelerator`` once it is imported, for the rest of this process."""
        on_import("accelerate.accelerator", self._wrap)
        if self._observer is not None and self._observer.steps is not None:
            set_options({"num_train_epochs": _MANY, "max_train_steps": _MANY})

    def _wrap(self, module: ModuleType) -> None:
        """Wrap ``Accelerator`` for its settings, models and accumulation, and the loaders that it prepares."""
        from autotune.worker.user.loader_overlay import copy_key, line_of_maker

        kind: Any = module.Accelerator
        signature = inspect.signature(kind.__init__)

        def make_changed(make: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
            """Create an ``Accelerator`` with the candidate's settings, and record which settings the script passed."""
            given = signature.bind(accelerator, *args, **kwargs)
            self._made_at = line_of_maker()
            self._passed = frozenset(name for name in _SETTINGS if given.arguments.get(name) is not None)
            given.arguments.update(self._wanted(given.arguments))
            make(*given.args, **given.kwargs)
            self._accelerator = accelerator

        around(kind, "__init__", make_changed)
        before(kind, "prepare", self._take_prepared_models)
        before(kind, "accumulate", lambda *_: setattr(self, "_accumulates", True))

        def keep(prepared: Any, _: Any, /, data_loader: Any, *__: Any, **___: Any) -> None:
            # A prepared loader may iterate over another loader that it has made.
            for made_of_it in (prepared, getattr(prepared, "base_dataloader", prepared)):
                copy_key(made_of_it, data_loader)

        after(kind, "prepare_data_loader", keep)
        loaders: Any = sys.modules["accelerate.data_loader"]
        self._observe_batches((loaders.DataLoaderShard, loaders.DataLoaderDispatcher))
        if self._observer is not None and self._observer.steps is not None:
            _write_nothing(kind)

    def _wanted(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``Accelerator`` with the candidate's settings; a given plugin is changed in place."""
        changes, wanted = self._changes, dict[str, Any]()
        if changes.precision is not None:
            wanted["mixed_precision"] = ACCELERATE[changes.precision]
        # A script that counts its batches itself divides its losses itself, so the ``Accelerator`` must not.
        if changes.accumulation is not None and changes.interface.accumulates_by == "accelerator":
            plugin = given.get("gradient_accumulation_plugin")
            own = given.get("gradient_accumulation_steps", 1) if plugin is None else plugin.num_steps
            if own != changes.accumulation:
                changes.overrules(own)
            if plugin is None:
                wanted["gradient_accumulation_steps"] = changes.accumulation
            else:
                plugin.num_steps = changes.accumulation
        return {**changes.override(given, wanted), **({"log_with": None} if self._observer is not None else {})}

    def _take_prepared_models(self, _: Any, *prepared: Any, **__: Any) -> None:
        """Record the models among the arguments of ``Accelerator.prepare``, and apply the settings to them."""
        for each in prepared:
            if isinstance(each, sys.modules["torch"].nn.Module):
                self._take_model(None, each)

    def precision(self, name: str) -> Precision:
        """Return the precision of the ``Accelerator``. Raises ``UserCodeError`` for one that no trial has."""
        precision: Any = self._accelerator.mixed_precision
        if precision not in ("no", "bf16", "fp16"):
            raise UserCodeError(f"{name} trains in {precision}", "use bf16, fp16 or no mixed precision")
        return "fp32" if precision == "no" else precision

    def told_accumulation(self) -> tuple[AccumulatesBy | None, int] | None:
        """Return the accumulation of the ``Accelerator``; ``None`` without a call of ``Accelerator.accumulate``."""
        return ("accelerator", self._accelerator.gradient_accumulation_steps) if self._accumulates else None

    def interface(self) -> dict[str, Any]:
        """Return where the ``Accelerator`` is created, and which settings the script passes."""
        return {"accelerator": os.path.basename(self._made_at), "passed": tuple(sorted(self._passed))}


def _write_nothing(kind: Any) -> None:
    """Disable tracking, saving and pushing to the hub in this process; ``kind`` is the class ``Accelerator``."""
    from huggingface_hub import HfApi
    from transformers import PreTrainedModel
    from transformers.utils import PushToHubMixin

    silence(kind, "init_trackers", "log", "save_state", "save_model", "save")
    silence(PreTrainedModel, "save_pretrained")
    silence(PushToHubMixin, "push_to_hub")
    silence(HfApi, "upload_folder", "upload_file")
    around(HfApi, "create_repo", lambda _, __, repo_id, *___, **____: SimpleNamespace(repo_id=repo_id))
