"""Scripts whose own training loop uses Lightning's ``Fabric`` (``lightning.fabric``, ``lightning_fabric``).

Precision is put over that of the ``Fabric`` that the script makes. The script accumulates by itself: that can be
searched where an option ``--gradient_accumulation_steps`` decides it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from autotune.core.candidate import Precision
from autotune.space import precision_names
from autotune.worker.user.adapter import Overlay, silence
from autotune.worker.wrapping import around, before, on_import


class FabricOverlay(Overlay):
    """What is put over every ``Fabric`` that is made in this process, and seen of it."""

    framework = "fabric"
    known_options: ClassVar = {
        "precision": ("--precision",),
        "workers": ("--num_workers", "--dataloader_num_workers", "--workers"),
    }
    _precision = "32-true"
    """Of the one that was made last."""

    def install(self) -> None:
        """Wrap ``Fabric`` once it is imported, from either package."""
        for package in ("lightning.fabric", "lightning_fabric"):
            on_import(f"{package}.fabric", self._wrap)

    def _wrap(self, module: ModuleType) -> None:
        """Wrap the class ``Fabric`` of a module, so that each instance gets the candidate's precision and batch."""
        kind: Any = module.Fabric
        changes, observer = self._changes, self._observer
        wanted = {} if changes.precision is None else {"precision": precision_names.LIGHTNING[changes.precision]}
        quiet: dict[str, Any] = {}
        if observer is not None:
            quiet = {
                "devices": 1,
                "num_nodes": 1,
                "loggers": None,
                **({"accelerator": "cpu"} if observer.on_cpu else {}),
            }
            silence(kind, "save", "log", "log_dict")
            self._give_batches((module._FabricDataLoader,))

        def made(make: Callable[..., None], fabric: Any, **options: Any) -> None:
            make(fabric, **{**changes.over(options, wanted), **quiet})
            self._precision = fabric._precision.precision

        around(kind, "__init__", made)
        for name in ("setup", "setup_module"):
            before(kind, name, self._take_model)

    def precision(self, name: str) -> Precision | None:
        """Return the precision of the latest ``Fabric``."""
        return precision_names.OF_LIGHTNING.get(self._precision)
