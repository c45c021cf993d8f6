"""Adapt private names of TRL."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def fold_logits_as_on_gpu() -> None:
    """Make TRL's chunked loss use as much memory as on a GPU, for the rest of this process.

    TRL (1.16) computes logits in tiles of up to 4,096 tokens and 32,768 entries of the vocabulary. On a GPU a Triton
    kernel reduces each in place, and another adds a product in 16 bits to a matrix in float32. Elsewhere torch does it,
    with several copies of a tile in float32, which is up to 2.5 GiB more. The values of the loss are wrong afterwards.

    A GPU also leaves out tokens without a label. This is not simulated: their number depends on the data.
    """
    if "trl" not in sys.modules:
        return
    try:
        kernels: Any = importlib.import_module("trl.kernels.chunked_logprob")
    except ImportError:
        return
    kernels._forward_tile = kernels._backward_tile = lambda *_, **__: None
    kernels._addmm_fp32 = _add_product


def _add_product(total: Any, left: Any, right: Any) -> None:
    """Stand in for adding the product of two matrices to a float32 matrix: no float32 copies, and wrong values."""
    scalar = total.new_empty(())
    total.addmm_(scalar.expand(left.shape), scalar.expand(right.shape))
