"""Have a module for each framework of scripts: how it is recognised, overlaid, inspected, traced and measured.

The modules import no library: where a script trains for real, what it does before its own imports has its effect.
"""

from __future__ import annotations

from autotune.core.code_interface import Framework
from autotune.worker.user.adapter import Overlay
from autotune.worker.user.frameworks.accelerate import AccelerateOverlay
from autotune.worker.user.frameworks.lightning import FabricOverlay, LightningOverlay

OVERLAYS: dict[Framework, type[Overlay]] = {
    kind.framework: kind for kind in (AccelerateOverlay, FabricOverlay, LightningOverlay)
}
