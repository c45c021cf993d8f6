"""Scripts whose own training loop uses Lightning's ``Fabric`` (``lightning.fabric``, ``lightning_fabric``).

Precision is put over that of the ``Fabric`` that the script makes. The script accumulates by itself: that can be
searched where an option ``--gradient_accumulation_steps`` decides it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune.core.candidate import Precision
from autotune.space import precision_names
from autotune.worker.user.adapter import (
    Changes,
    GivesBatches,
    LoopInspection,
    ScriptInspection,
    give_batches,
    measured_batches,
    silence,
)
from autotune.worker.wrapping import around, before, on_import

if TYPE_CHECKING:
    from autotune.worker.user.loop_steps import LoopSteps

_OPTIONS = {
    "precision": ("--precision",),
    "workers": ("--num_workers", "--dataloader_num_workers", "--workers"),
}


def overlay(changes: Changes) -> None:
    """Have every ``Fabric`` made with other settings."""
    FabricOverlay(changes).install()


def measure(changes: Changes, steps: LoopSteps, output_dir: str, *, on_cpu: bool) -> None:
    """Do that in a trial, and tell of the batches."""
    FabricOverlay(changes, _quiet(on_cpu=on_cpu), measured_batches(changes, steps)).install()


def inspect(inspecting: ScriptInspection) -> Callable[[], bool]:
    """Look at what the script trains with, up to its second step."""
    return FabricInspection(inspecting).install()


def _quiet(*, on_cpu: bool) -> dict[str, Any]:
    return {"devices": 1, "num_nodes": 1, "loggers": None, **({"accelerator": "cpu"} if on_cpu else {})}


class FabricOverlay:
    """What is put over every ``Fabric`` that is made in this process, and seen of it."""

    def __init__(
        self, changes: Changes, quiet: dict[str, Any] | None = None, gives: GivesBatches | None = None
    ) -> None:
        self._changes = changes
        self._quiet = quiet
        """What it is given beside, in a training that is only looked at; ``None`` in one that is for real."""
        self._gives = gives
        self.precision: str = "32-true"
        """Of the one that was made last."""
        self.models: list[Any] = []

    def install(self) -> None:
        """Wrap the class wherever it is imported from, once it is."""
        for package in ("lightning.fabric", "lightning_fabric"):
            on_import(f"{package}.fabric", self._wrap)

    def _wrap(self, module: ModuleType) -> None:
        """Wrap the class ``Fabric`` of a module: each one made gets the candidate's precision and batch."""
        kind: Any = module.Fabric
        changes = self._changes
        wanted = {} if changes.precision is None else {"precision": precision_names.LIGHTNING[changes.precision]}

        def made(make: Callable[..., None], fabric: Any, **options: Any) -> None:
            make(fabric, **{**changes.over(options, wanted), **(self._quiet or {})})
            self.precision = fabric._precision.precision

        around(kind, "__init__", made)
        for name in ("setup", "setup_module"):
            before(kind, name, self._on_setup)
        if self._quiet is None:
            return
        silence(kind, "save", "log", "log_dict")
        if self._gives is not None:
            give_batches((module._FabricDataLoader,), self._gives)

    def _on_setup(self, _: Any, module: Any, *__: Any, **___: Any) -> None:
        self.models.append(module)
        self._changes.apply_to(module)


class FabricInspection(LoopInspection):
    """What a script is seen to train with, up to its second step."""

    framework, known_options = "fabric", _OPTIONS

    def __init__(self, inspecting: ScriptInspection) -> None:
        super().__init__(inspecting)
        is_on_cpu = inspecting.work.devices.kind == "cpu"
        self.overlay = FabricOverlay(Changes(), _quiet(on_cpu=is_on_cpu), self.batches)

    def precision(self) -> Precision | None:
        """Return that of the ``Fabric`` that was made last."""
        return precision_names.OF_LIGHTNING.get(self.overlay.precision)
