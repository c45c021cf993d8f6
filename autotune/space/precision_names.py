"""Name a precision as Accelerate's ``mixed_precision``, Lightning's ``Trainer(precision=…)`` and torch's dtypes do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from autotune.core.candidate import Precision

HALF: Mapping[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}
"""The dtype that a precision computes in, of those with 16 bits."""

# TF32 is set through torch.
ACCELERATE: dict[Precision, str] = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
LIGHTNING: dict[Precision, str] = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
OF_LIGHTNING: dict[str, Precision] = {name: precision for precision, name in LIGHTNING.items() if precision != "tf32"}
"""Of Lightning's names; ``32-true`` is tf32 as well, where matrix products are."""
