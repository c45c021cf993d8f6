"""Classify GPU kernels by name into kinds of work, such as matrix products and attention.

Names are those of cuBLAS, cuDNN and torch 2.6 to 2.13; no list of them is published.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

_KINDS = (
    (
        "attention_backward",
        r"(flash|fmha|mem_eff|attention).*(bwd|backward|bprop)|(bwd|backward).*(flash|fmha|attention)"
        r"|fmha_cutlassb|convert_dq|compute_dot_do|fmha_reduce_head",
    ),
    ("attention", r"flash|fmha|mem_eff|attention|_sdpa_"),
    ("convolution", r"conv|wgrad|dgrad|implicit_gemm|cudnn.*nhwc"),
    ("matrix_product", r"gemm|cutlass|nvjet|xmma|cublas|splitk|gemv|::dot"),
    ("fused_update", r"multi_tensor|fused_?adam"),
    ("normalisation_backward", r"(layer_?norm|rms_?norm|group_?norm|gamma|rowwise).*(grad|backward)|gammabeta"),
    ("normalisation", r"layer_?norm|rms_?norm|group_?norm|rowwisemoments"),
    ("softmax", r"softmax|nll_loss|cross_entropy"),
    ("dropout", r"dropout"),
    ("gather", r"embedding|index|gather|scatter|sort|radix|unique|scan"),
    ("reduction", r"reduce"),
    ("transpose", r"transpose|permute|catarray"),
    ("cast", r"copy.*(bfloat16|half).*float|copy_kernel|bfloat16_copy|_copy_"),
    ("copy", r"memcpy|copy"),
    ("fill", r"memset|fill"),
)


@functools.cache
def kind_of_kernel(name: str) -> str:
    """Return the kind of work of a GPU kernel, from its name; ``elementwise`` where no pattern matches."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lower)), "elementwise")


_ALIKE = {
    "copy": "cast",
    "transpose": "cast",
    "elementwise_cast": "elementwise",
    "gradient_accumulation": "elementwise",
    "gradient_clipping": "fused_update",
}
"""Kinds that operations tell apart, and the names of kernels do not."""


def merge_kinds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Add up times of kinds that kernel names cannot tell apart, so that predicted and measured times compare."""
    merged: dict[str, float] = {}
    for kind, value in seconds.items():
        name = _ALIKE.get(kind, kind)
        merged[name] = merged.get(name, 0.0) + value
    return merged
