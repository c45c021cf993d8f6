"""Prints how far a product of float32 matrices on the GPU is off, under a candidate's ``TrainingArguments``."""

import json
import sys
import tempfile

import torch

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Effort
from autotune.worker.trial.run import trainer_arguments


def main() -> None:
    """``python print_matmul_error.py PRECISION``: one line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer_arguments(Candidate(Arm(sys.argv[1]), 8), "cuda", Effort(), folder, 1)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    product = torch.nn.functional.linear(left.cuda(), right.T.contiguous().cuda()).cpu().double()
    print(
        json.dumps(
            {
                "relative_error": float((product - exact).norm() / exact.norm()),
                "devices": torch.cuda.device_count(),
                "uuid": str(getattr(torch.cuda.get_device_properties(0), "uuid", "")),
                "n_gpu": arguments.n_gpu,
                "device": str(arguments.device),
            }
        )
    )


if __name__ == "__main__":
    main()
