"""Name a precision as Accelerate's ``mixed_precision`` and Lightning's ``Trainer(precision=…)`` do."""

from __future__ import annotations

from autotune.core.candidate import Precision

# TF32 is set through torch.
ACCELERATE: dict[Precision, str] = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
LIGHTNING: dict[Precision, str] = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
