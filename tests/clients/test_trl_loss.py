"""The memory of TRL's loss without logits is traced as a GPU takes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from trl.kernels import ChunkedLogProbFunction
from autotune.worker.private.trl import fold_logits_as_on_gpu
if sys.argv[1] == "gpu":
    fold_logits_as_on_gpu()

class Sizes(TorchDispatchMode):
    large = 0
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32 and made.numel() == 4096 * 32768:
            self.large += not function._schema.is_mutable and not function.is_view
        return made

with FakeTensorMode(), Sizes() as sizes:
    hidden = torch.empty(4096, 64, dtype=torch.bfloat16, requires_grad=True)
    head = torch.empty(65536, 64, dtype=torch.bfloat16, requires_grad=True)
    words = torch.zeros(4096, dtype=torch.int64)
    scores, *_ = ChunkedLogProbFunction.apply(hidden, head, None, words, 1.0, 32768, None, 1.0, ("entropy",))
    scores.sum().backward()
    assert hidden.grad.shape == hidden.shape and head.grad.dtype == head.dtype
print(sizes.large)
"""


@pytest.mark.clients
def test_tiles_of_logits_are_folded_in_place() -> None:
    pytest.importorskip("trl.kernels", reason="TRL 1.16 is not installed: make test-clients")

    def tiles(*words: str) -> int:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        command = [sys.executable, "-c", PROGRAM, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
        return int(done.stdout)

    # Where torch folds them, each is copied several times in float32.
    assert tiles("cpu") > 10
    assert tiles("gpu") == 0
