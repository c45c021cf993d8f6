"""Test what torch keeps for the backward pass of a compiled layer that checkpoints."""

from functools import partial

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune.space.features import compiled_recomputes

bnb = pytest.importorskip("bitsandbytes")


class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Frozen weights in 4 bits beside trained ones, as in a layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        self.frozen.weight.requires_grad_(False)
        self.trained = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)

        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        quantized = self.frozen(torch.nn.functional.silu(hidden))
        return torch.nn.functional.silu(quantized) + self.trained(hidden)


def test_what_goes_into_quantized_layers_is_recomputed_since_a_version() -> None:
    hidden, kept = torch.randn(3, 5, 64, dtype=torch.bfloat16, requires_grad=True), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    layer = Layer().to("cpu")
    layer.compile(backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden)
    # Its input, and no activation.
    assert (kept.count((3, 5, 64)) == 1) == compiled_recomputes(torch.__version__, transformers.__version__)
