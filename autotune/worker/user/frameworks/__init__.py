"""Adapt frameworks that scripts train with, in one module for each library: their overlays, listed in ``OVERLAYS``.

Importing these modules imports no library: in a real training, what a script sets before its own imports must take
effect.
"""

from __future__ import annotations

from autotune.core.code_interface import Framework
from autotune.worker.user.adapter import Overlay
from autotune.worker.user.frameworks.accelerate import AccelerateOverlay
from autotune.worker.user.frameworks.lightning import FabricOverlay, LightningOverlay

OVERLAYS: dict[Framework, type[Overlay]] = {
    kind.framework: kind for kind in (AccelerateOverlay, FabricOverlay, LightningOverlay)
}
