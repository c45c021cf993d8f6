"""Name a precision as Accelerate's ``mixed_precision`` and Lightning's ``Trainer(precision=…)`` do."""

from __future__ import annotations

from autotune.core.candidate import Precision

# TF32 is set through torch.
ACCELERATE: dict[Precision, str] = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
LIGHTNING: dict[Precision, str] = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
OF_LIGHTNING: dict[str, Precision] = {name: precision for precision, name in LIGHTNING.items() if precision != "tf32"}
"""Of Lightning's names; ``32-true`` is tf32 as well, where matrix products are."""
